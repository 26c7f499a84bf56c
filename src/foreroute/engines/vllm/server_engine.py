"""vLLM behind its OpenAI-compatible server, started by someone else. `docs/engines.md` has the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel, Weights
from foreroute.adapters.versions import require_engine
from foreroute.capture import Generation, Sampling
from foreroute.engines.base import (
    OutsideEngine,
    SampledSequence,
    draw_seeds,
    generation_of,
    require_same_prompt,
    require_version,
    stop_token_ids,
)
from foreroute.engines.http import Answer, Endpoint
from foreroute.engines.weights_folder import WeightsFolder
from foreroute.errors import EngineError

REASONS = ("stop", "length", "abort")
EXTENSION = "foreroute.engines.vllm.worker_plugin.WorkerExtension"
REQUIRED = {
    # setting of the server: value, and the argument that sets it
    "enable_return_routed_experts": (True, "--enable-return-routed-experts"),
    "logprobs_mode": ("processed_logprobs", "--logprobs-mode processed_logprobs"),
}
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
"""The second one alone returns sampling masks."""


class VLLMServerEngine(OutsideEngine):
    """The trainer's rollout engine behind a server that it has for itself.

    Weights go through a folder that both can read. Needs VLLM_SERVER_DEV_MODE=1 on the server.

    Args:
        model: the policy, as it is served.
        url: such as "http://127.0.0.1:8000".
        weights_folder: where checkpoints are put: new, empty, or used for nothing else before. The server must see it
            under the same path.
        timeout_s: for each request.
        concurrency: prompts under way at once.

    Attributes:
        weight_version: the version last loaded; every row is stamped with it.

    Raises:
        ConfigError: when `url` is no address, or `weights_folder` holds something else.
        EngineError: when the server cannot be reached, is of a version that does not work, or was started without what
            replay needs.
    """

    def __init__(
        self,
        model: ServedModel,
        url: str,
        *,
        weights_folder: Path,
        timeout_s: float = 600.0,
        concurrency: int = 32,
    ) -> None:
        super().__init__(model)
        self._concurrency = concurrency
        self._server = Endpoint(url, timeout_s=timeout_s, what="the vLLM server")
        self._engine_version = self._server.get("/version").read(str, "version")
        require_engine("vLLM", self._engine_version)
        self._model = self._server.get("/v1/models").read(str, "data", 0, "id")
        self._require_settings()
        self._weights = WeightsFolder(weights_folder, model.writer)

    def load_weights(self, weights: Weights, version: int) -> None:
        """Take over the trainer's weights, forget the prefix cache, and stamp what follows with `version`."""
        folder = str(self._weights.put(weights))
        with self._loading(version), self._paused():
            loaded = self._server.post("/collective_rpc", {"method": "foreroute_load", "args": [folder]})
            if not (results := loaded.read(list, "results")) or any(each != folder for each in results):
                raise EngineError(f"the server's workers loaded {results!r:.200}, each was asked to load {folder!r}")
            # what is cached was computed, and routed, by the old weights
            if not self._server.post("/reset_prefix_cache", {}).read(bool, "success"):
                raise EngineError("the server could not reset its prefix cache: requests of someone else are running")
            self._server.post("/update_weight_version", {"new_version": str(version)})

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt; as `embedded.EmbeddedEngine.generate`."""
        self._require_ready(sampling)
        path = GENERATE if sampling.truncates else COMPLETIONS
        params = {
            **({"temperature": sampling.temperature} if self._without_masks else self._cuts(sampling)),
            "n": sampling.group_size,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": stop_token_ids(sampling),
            "ignore_eos": True,
            "logprobs": 0,
        }
        seeds = draw_seeds(generator, len(prompts))
        bodies = [self._body(path, p, params | {"seed": int(s)}) for p, s in zip(prompts, seeds, strict=True)]
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = list(pool.map(lambda one: self._server.post(path, one), bodies))
        require_version(self._server.get("/weight_info").read(str, "weight_version"), self.weight_version)
        sequences = [
            s
            for p, answer in zip(prompts, answers, strict=True)
            for s in sequences_of(answer.value, p, masks=path == GENERATE)
        ]
        if len(sequences) != sampling.group_size * len(prompts):
            raise EngineError(
                f"the server returned {len(sequences)} responses to {len(prompts)} x {sampling.group_size}"
            )
        return generation_of(
            sequences,
            self._served,
            weight_version=self.weight_version,
            engine="vllm",
            engine_version=self._engine_version,
        )

    def _body(self, path: str, prompt: NDArray[np.int32], params: Mapping[str, Any]) -> dict[str, Any]:
        if path == GENERATE:
            own: dict[str, Any] = {"token_ids": prompt.tolist(), "sampling_params": params}
        else:
            # a server without a tokenizer cannot write tokens as text
            own = {"prompt": prompt.tolist(), **params, "return_tokens_as_token_ids": True}
        return {"model": self._model, "return_token_ids": True, **own}

    def close(self) -> None:
        """Let go of the folder of weights; the server is not the trainer's to end. May be called again."""
        self._weights.close()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """No request runs meanwhile; afterwards the server goes on, whatever has happened."""
        try:
            self._server.post("/pause?mode=wait", {})
            yield
        except BaseException as error:
            try:
                self._server.post("/resume", {})
            except EngineError as again:
                if isinstance(error, EngineError):
                    raise EngineError(f"{error}\nIt may be paused still: {again}") from error
            raise
        self._server.post("/resume", {})

    def _require_settings(self) -> None:
        """Ask the server how it was started, because a wrong setting gives wrong log-probs without an error."""
        try:
            info = self._server.get("/server_info?config_format=json")
        except EngineError as error:
            raise EngineError(f"start the server with VLLM_SERVER_DEV_MODE=1 in its environment ({error})") from error
        model, parallel = (info.read(dict, "vllm_config", name) for name in ("model_config", "parallel_config"))
        missing = [argument for name, (value, argument) in REQUIRED.items() if model.get(name) != value]
        is_cpu = info.read(str, "vllm_config", "device_config", "device") == "cpu"
        if is_cpu and info.read(bool, "vllm_config", "scheduler_config", "enable_chunked_prefill"):
            # vLLM 0.30 dies on a seeded request whose prompt is prefilled in chunks on the CPU
            missing.append("--no-enable-chunked-prefill")
        if parallel.get("worker_extension_cls") != EXTENSION:
            missing.append(f"--worker-extension-cls {EXTENSION}")
        if missing:
            raise EngineError(f"the vLLM server must be started with {' '.join(missing)}")
        if model.get("return_sampling_mask") is not True:
            self._without_masks = "start the vLLM server with --return-sampling-mask --enable-scale-out"


def sequences_of(answer: Any, prompt: NDArray[np.int32], *, masks: bool = False) -> list[SampledSequence]:
    """The choices of a completion, or of what was generated with sampling masks, in order.

    Raises:
        EngineError: when it lacks what was asked for, or is the answer to other tokens.
    """
    whole = Answer(answer, "the vLLM server's answer")
    choices = whole.each("choices")
    found: dict[int, SampledSequence] = {}
    for choice in choices:
        for stated in (whole, choice):
            if stated.has("prompt_token_ids"):
                require_same_prompt(prompt, stated.integers("prompt_token_ids"))
        if (reason := choice.read(str, "finish_reason")) not in REASONS:
            raise EngineError(f"the vLLM server ended a response for the reason {reason!r:.40}; expected {REASONS}")
        output = {"routed_experts": choice.value.get("routed_experts"), "token_ids": choice.value.get("token_ids")}
        if masks:
            output["sampling_mask"] = choice.read(list, "sampling_mask")
            steps = [step.read(dict).get("logprob") for step in choice.each("logprobs", "content")]
            logprobs = Answer(steps, "the log-probs of the vLLM server's answer").numbers()
        else:
            logprobs = choice.numbers("logprobs", "token_logprobs")
        found[choice.read(int, "index")] = SampledSequence(
            prompt, choice.integers("token_ids"), logprobs, output, finished=reason != "abort"
        )
    if sorted(found) != list(range(len(choices))):
        raise EngineError(f"the vLLM server numbered {len(choices)} responses {sorted(found)}; expected each once")
    return [found[index] for index in sorted(found)]
