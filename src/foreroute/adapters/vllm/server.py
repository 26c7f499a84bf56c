"""vLLM behind its OpenAI-compatible server, started by someone else. `docs/engines.md` has the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import CheckpointWriter
from foreroute.adapters.endpoint import Endpoint
from foreroute.adapters.hf import RoutedModel
from foreroute.adapters.sampled import (
    Sampled,
    draw_seeds,
    facts_of,
    generation_of,
    require_same_prompt,
    require_version,
)
from foreroute.capture import Generation, Sampling
from foreroute.errors import EngineError
from foreroute.trace import NO_VERSION

EXTENSION = "foreroute.adapters.vllm.extension.WorkerExtension"
REQUIRED = {
    # setting of the server: value, and the argument that sets it
    "enable_return_routed_experts": (True, "--enable-return-routed-experts"),
    "logprobs_mode": ("processed_logprobs", "--logprobs-mode processed_logprobs"),
}


class ServerEngine:
    """The trainer's rollout engine behind a server that it has for itself.

    Weights go through a folder that both can read. Needs VLLM_SERVER_DEV_MODE=1 on the server.

    Args:
        routed: the policy.
        url: such as "http://127.0.0.1:8000".
        weights_folder: where checkpoints are put; the server must see it under the same path.
        timeout_s: for each request.
        concurrency: prompts under way at once.

    Attributes:
        weight_version: the version last loaded; every row is stamped with it.

    Raises:
        EngineError: when the server cannot be reached, or was started without what replay needs.
    """

    def __init__(
        self,
        routed: RoutedModel,
        url: str,
        *,
        weights_folder: Path,
        timeout_s: float = 600.0,
        concurrency: int = 32,
    ) -> None:
        self.weight_version = NO_VERSION
        self._facts = facts_of(routed)
        self._writer = CheckpointWriter(routed.model)
        self._folder = weights_folder
        self._concurrency = concurrency
        self._server = Endpoint(url, timeout_s=timeout_s, what="the vLLM server")
        self._model = self._server.get("/v1/models")["data"][0]["id"]
        self._engine_version = str(self._server.get("/version")["version"])
        self._require_settings()

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over the trainer's weights, forget the prefix cache, and stamp what follows with `version`."""
        folder = self._writer.write(self._folder / "weights", weights)
        self._server.post("/pause?mode=wait", {})
        request = {"method": "foreroute_load", "args": [str(folder.resolve())]}
        self._server.post("/collective_rpc", request)
        # what is cached was computed, and routed, by the old weights
        if not self._server.post("/reset_prefix_cache", {})["success"]:
            raise EngineError("the server could not reset its prefix cache: requests of someone else are running")
        self._server.post("/update_weight_version", {"new_version": str(version)})
        self._server.post("/resume", {})
        self.weight_version = version

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt; as `hf.EmbeddedEngine.generate`."""
        body = {
            "model": self._model,
            "n": sampling.group_size,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": [sampling.end_token],
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            # a server without a tokenizer cannot write tokens as text
            "return_tokens_as_token_ids": True,
        }
        seeds = draw_seeds(generator, len(prompts))
        bodies = [body | {"prompt": p.tolist(), "seed": int(s)} for p, s in zip(prompts, seeds, strict=True)]
        with ThreadPoolExecutor(self._concurrency) as pool:
            answers = list(pool.map(lambda one: self._server.post("/v1/completions", one), bodies))
        require_version(str(self._server.get("/weight_info")["weight_version"]), self.weight_version)
        sequences = [s for p, answer in zip(prompts, answers, strict=True) for s in sampled_of(answer, p)]
        if len(sequences) != sampling.group_size * len(prompts):
            raise EngineError(
                f"the server returned {len(sequences)} responses to {len(prompts)} x {sampling.group_size}"
            )
        return generation_of(
            sequences,
            self._facts,
            weight_version=self.weight_version,
            engine="vllm",
            engine_version=self._engine_version,
        )

    def close(self) -> None:
        """Nothing: the server is not the trainer's to end."""

    def _require_settings(self) -> None:
        """Ask the server how it was started, because a wrong setting gives wrong log-probs without an error."""
        try:
            config = self._server.get("/server_info?config_format=json")["vllm_config"]
            model, parallel = config["model_config"], config["parallel_config"]
        except EngineError as error:
            raise EngineError(f"start the server with VLLM_SERVER_DEV_MODE=1 in its environment ({error})") from error
        missing = [argument for name, (value, argument) in REQUIRED.items() if model.get(name) != value]
        if config["device_config"]["device"] == "cpu" and config["scheduler_config"]["enable_chunked_prefill"]:
            # vLLM 0.30 dies on a seeded request whose prompt is prefilled in chunks on the CPU
            missing.append("--no-enable-chunked-prefill")
        if parallel.get("worker_extension_cls") != EXTENSION:
            missing.append(f"--worker-extension-cls {EXTENSION}")
        if missing:
            raise EngineError(f"the vLLM server must be started with {' '.join(missing)}")


def sampled_of(answer: Any, prompt: NDArray[np.int32]) -> list[Sampled]:
    """The choices of a completion response, in order.

    Raises:
        EngineError: when it lacks what was asked for, or is the answer to other tokens.
    """
    try:
        for choice in answer["choices"]:
            require_same_prompt(prompt, choice.get("prompt_token_ids"))
        return [
            Sampled(
                prompt=prompt,
                response=np.array(choice["token_ids"], np.int32),
                logprobs=np.array(choice["logprobs"]["token_logprobs"], np.float32),
                output={"routed_experts": choice["routed_experts"]},
            )
            for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
        ]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(
            f"the vLLM server's answer lacks or garbles a field ({error!r}); expected 0.28 to 0.30"
        ) from error
