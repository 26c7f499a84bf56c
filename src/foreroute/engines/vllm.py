"""vLLM as the trainer's rollout engine: a server that is started and ended here, or one of yours, spoken to over HTTP.

    from foreroute.adapters import hf
    from foreroute.adapters.checkpoint import ServedModel
    from foreroute.engines import vllm

    settings = vllm.ServerSettings(python=Path("venv-vllm/bin/python"), precision="bfloat16")
    with vllm.VLLMEngine(ServedModel.of(hf.attach(model)), settings) as engine:
        engine.load_weights(model.state_dict(), version=0)
        generation = engine.generate(prompts, Sampling(max_new_tokens=512, end_token=0, group_size=8), generator)

vLLM itself is not imported in the trainer's process: it pins other versions, and lives in an environment of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel
from foreroute.adapters.versions import at_least, require_engine
from foreroute.capture import Generation, Sampling
from foreroute.engines.base import (
    OutsideEngine,
    Request,
    Response,
    WeightsFolder,
    check_echo,
    check_versions,
    stop_token_ids,
)
from foreroute.engines.http import Answer, BrokenOffError, Client
from foreroute.engines.vllm_server import EXTENSION, ServerProcess, ServerSettings
from foreroute.errors import ConfigError, EngineError, shown
from foreroute.replay.indexers import warn_of_choices

__all__ = ["ServerSettings", "VLLMEngine"]

GENERATE, INFO = "/inference/v1/generate", "/server_info"
DEVELOPMENT = "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
MISSING = {
    GENERATE: "Start the server with --enable-scale-out",
    **dict.fromkeys((INFO, "/collective_rpc", "/pause", "/weight_info"), DEVELOPMENT),
}
"""Advice on a path that a server does not have."""
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Stated in every request, because a server may have others as defaults, from the folder of its model."""
REFUSED_CONNECTORS = ("Nixl", "MoRIIO", "Mooncake")
_NUMBER = re.compile("[0-9]{1,10}")


class VLLMEngine(OutsideEngine):
    """The trainer's rollout engine on vLLM, 0.28 or newer.

    A server that is started here loads in the background, and the first request waits for it. It is ended with this
    object, or with the trainer. A server of yours needs VLLM_SERVER_DEV_MODE=1, serves this trainer alone, and is left
    running. Weights go through a folder that both can read.

    Args:
        server: how to start one, or the address of yours, such as "http://127.0.0.1:8000".
        weights_folder: for a server of yours, and of one trainer at a time. The server must see it under the same path.
            Checkpoints are put into `foreroute-weights` in it.
        timeout_s: for the start, and for each request.
        at_once: the most responses that are sampled at once.

    Attributes:
        weight_version: the version last loaded; every row is stamped with the version that computed it.

    Raises:
        ConfigError: when `server` is no address, another trainer has `weights_folder`, or neither the model nor the
            settings say how long a sequence may be.
        EngineError: when the server cannot be reached, is of a release that does not work, or was started without what
            replay needs. Every method raises it when the server fails, dies, is late, or answers something else than it
            was asked.
    """

    def __init__(
        self,
        model: ServedModel,
        server: ServerSettings | str,
        *,
        weights_folder: Path | None = None,
        timeout_s: float = 600.0,
        at_once: int = 256,
    ) -> None:
        super().__init__(model, "vllm")
        if model.indexers:
            warn_of_choices("vLLM returns none of their choices", "SGLang and EmbeddedEngine return both")
        self._timeout_s = timeout_s
        self._returns_masks = False
        self._process: ServerProcess | None = None
        url, socket = "http://vllm", None
        if isinstance(server, ServerSettings) and weights_folder is None:
            self._process = ServerProcess(server, model)
            socket, weights_folder = self._process.socket, self._process.folder
        elif isinstance(server, str) and weights_folder is not None:
            url = server
        else:
            raise ConfigError(
                f"the server is {shown(server)}; expected ServerSettings, or the address of yours, such as "
                "http://127.0.0.1:8000, and a weights_folder for it"
            )
        self._client = Client(
            url, timeout_s=timeout_s, what="the vLLM server", socket=socket, at_once=at_once, missing=MISSING
        )
        if self._process is None:
            self._check_server()
        self._weights = WeightsFolder(weights_folder, model.writer)

    def close(self) -> None:
        """End the server that was started here, and release the folder of weights. May be called again."""
        super().close()
        if self._process is not None:
            self._process.close()

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample as `Engine.generate` says, of `foreroute.engines.base`.

        After `load_weights`, the same state of `generator` gives the same seeds, one for each response.
        """
        requests, process = self._make_requests(prompts, sampling, generator), self._process
        longest = max(len(each.prompt) for each in requests) + sampling.max_new_tokens
        if process is not None and longest > process.max_model_len:
            raise ConfigError(
                f"prompt and response may take {longest} tokens, max_model_len is {process.max_model_len}; raise it, "
                "or sample fewer tokens"
            )
        with self._explaining_death():
            params = self._sampling_params(sampling)
            # one response per request: vLLM 0.28 returns one of several, and newer ones make as many requests of them
            bodies = [
                {
                    "request_id": each.id,
                    "token_ids": each.prompt.tolist(),
                    "sampling_params": {**params, "seed": each.seed},
                    "return_token_ids": True,
                }
                for each in requests
            ]
            num_loaded = len(self._loaded)
            # a server that returns masks returns one for every token
            most = self._bound_answer(requests, most_kept=int(params["top_k"]) if self._returns_masks else 0)
            answers = self._client.ask(GENERATE, bodies, most_bytes=most)
            check_versions({self._client.get("/weight_info").read(str, "weight_version")}, self._loaded[-1:])
        echoes = at_least(self._engine_version, "0.30")
        responses = [read_response(*each, echoes=echoes) for each in zip(answers, requests, strict=True)]
        # another thread of this trainer may have loaded weights meanwhile
        return self._to_generation(requests, responses, self._loaded[max(0, num_loaded - 1) :])

    def _load_checkpoint(self, folder: str, version: int) -> None:
        with self._explaining_death():
            try:
                self._client.post("/pause?mode=wait", {})
                loaded = self._client.post("/collective_rpc", {"method": "foreroute_load", "args": [folder]})
                if not (results := loaded.read(list, "results")) or any(each != folder for each in results):
                    raise EngineError(
                        f"the server's workers loaded {results!r:.200}, each was asked to load {folder!r}"
                    )
                # what is cached was computed, and routed, by the old weights
                if not self._client.post("/reset_prefix_cache", {}).read(bool, "success"):
                    raise EngineError("the server could not reset its prefix cache: requests of someone else run")
                self._client.post("/update_weight_version", {"new_version": str(version)})
            finally:  # whatever has happened
                self._client.post("/resume", {})

    def _sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        if sampling.truncates and not self._returns_masks:
            raise ConfigError(
                "this engine does not return sampling masks, without which log-probs under top_k, top_p or min_p "
                "cannot be compared; start vLLM with them: sampling_masks of ServerSettings, or "
                "--return-sampling-mask for a server of yours, or leave the three out"
            )
        truncation = (
            self._truncation_params(sampling)
            if self._returns_masks
            else {**NEUTRAL, "temperature": sampling.temperature}
        )
        ends = {"max_tokens": sampling.max_new_tokens, "stop_token_ids": stop_token_ids(sampling), "ignore_eos": True}
        return {**truncation, **PENALTIES, **ends, "logprobs": 0, "detokenize": False}

    @contextmanager
    def _explaining_death(self) -> Iterator[None]:
        """Wait until the server runs; where it was started here and dies, quote its log in the error."""
        process = self._process
        if process is not None and not self._engine_version:
            process.wait(self._client, self._timeout_s)
            self._check_server()
        try:
            yield
        except EngineError as error:
            # a connection that broke off is noticed before the process has ended
            if process is not None and (how := process.exit_words(may_be_near=isinstance(error, BrokenOffError))):
                raise process.close_with_error(f"the vLLM server died ({how}): {error}") from error
            raise

    def _check_server(self) -> None:
        """Check how the server was started: a wrong setting gives wrong log-probs without an error."""
        version = self._client.get("/version").read(str, "version")
        require_engine("vLLM", version)
        config = Answer(self._client.get(f"{INFO}?config_format=json").read(dict, "vllm_config"), "vllm_config")
        if missing := missing_settings(config, version):
            raise EngineError(f"the vLLM server must be started with {', and '.join(missing)}")
        self._returns_masks = config.read(dict, "model_config").get("return_sampling_mask") is True
        self._engine_version = version


def missing_settings(config: Answer, version: str) -> list[str]:
    """Return what a server with this `vllm_config` lacks for replay, as arguments or in words."""
    newer, is_cpu = at_least(version, "0.31"), config.read(str, "device_config", "device") == "cpu"
    routes = "aux_output" if newer else "model"
    wanted: list[tuple[str, str, str, object]] = [
        ("--enable-return-routed-experts", routes, "enable_return_routed_experts", True),
        ("--logprobs-mode processed_logprobs", "model", "logprobs_mode", "processed_logprobs"),
        (f"--worker-extension-cls {EXTENSION}", "parallel", "worker_extension_cls", EXTENSION),
        ("--pipeline-parallel-size 1, since stages return no routes", "parallel", "pipeline_parallel_size", 1),
    ]
    if newer:  # routes are kept beside cached blocks
        wanted.append(
            ("--enable-prefix-caching, without which it has no routes", "cache", "enable_prefix_caching", True)
        )
    elif is_cpu:  # vLLM dies on a seeded request whose prompt is prefilled in chunks
        wanted.append(("--no-enable-chunked-prefill", "scheduler", "enable_chunked_prefill", False))
    missing = [
        argument for argument, part, name, value in wanted if config.read(dict, f"{part}_config").get(name) != value
    ]
    transfer = config.value.get("kv_transfer_config")
    connector = transfer.get("kv_connector") if isinstance(transfer, dict) else None
    if any(name in str(connector) for name in REFUSED_CONNECTORS):
        missing.append(f"another KV connector than {connector!r:.40}, with which no routes are returned")
    return missing


def read_response(answer: Answer, request: Request, *, echoes: bool) -> Response:
    """Read the one choice of an answer of `/inference/v1/generate`; raise `EngineError` when it is of another request.

    `echoes` says whether this release states the prompt; vLLM does from 0.30 on, and its length before.
    """
    if not (named := answer.read(str, "request_id")).endswith(request.id):
        raise EngineError(f"the vLLM server answers the request {named!r:.80}, asked was {request.id!r}")
    if echoes:
        check_echo("the prompt", request.prompt, answer.integers("prompt_token_ids"))
    elif (length := answer.read(int, "usage", "prompt_tokens")) != len(request.prompt):
        raise EngineError(f"the vLLM server answers a prompt of {length} tokens, it was sent {len(request.prompt)}")
    if len(choices := answer.elements("choices")) != 1:
        raise EngineError(f"the vLLM server returned {len(choices)} responses, asked for 1")
    (choice,) = choices
    reason, tokens = choice.read(str, "finish_reason"), choice.integers("token_ids")
    states_versions = bool(len(tokens)) and choice.has("weight_versions")  # from 0.31 on
    # a server that can return masks does so for every request
    masks = choice.read(list, "sampling_mask") if request.sampling.truncates and len(tokens) else None
    steps = choice.elements("logprobs", "content")
    logprobs = Answer([step.read(dict).get("logprob") for step in steps], "the log-probs of the vLLM server").numbers()
    # `token_id` from 0.31 on, and a text "token_id:7" before
    named_by = [
        step.value["token_id"] if step.has("token_id") else step.read(str, "token").removeprefix("token_id:")
        for step in steps
    ]
    whole = [int(each) if isinstance(each, str) and _NUMBER.fullmatch(each) else each for each in named_by]
    logprob_tokens = Answer(whole, "the tokens of the vLLM server's log-probs").integers()
    return Response(tokens, logprobs, logprob_tokens, reason, {**choice.value, "sampling_mask": masks}, states_versions)
