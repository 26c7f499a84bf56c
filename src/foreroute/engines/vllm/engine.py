"""The trainer's rollout engine: `vllm serve` started as a child, or a server of the user's, spoken to over HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from foreroute.adapters.checkpoint import ServedModel
from foreroute.adapters.versions import at_least, require_engine
from foreroute.capture import Generation, Sampling
from foreroute.engines.base import OutsideEngine, draw_seeds, most_bytes_of, require_prompts, stop_token_ids
from foreroute.engines.http import Answer, BrokenOffError, Client
from foreroute.engines.sequences import PartialGeneration, require_own
from foreroute.engines.vllm.answers import response_of
from foreroute.engines.vllm.server import EXTENSION, ServerProcess, ServerSettings
from foreroute.engines.weights_folder import WeightsFolder
from foreroute.errors import ConfigError, EngineError

GENERATE, INFO = "/inference/v1/generate", "/server_info"
DEVELOPMENT = "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment"
MISSING = {
    GENERATE: "Start the server with --enable-scale-out",
    **dict.fromkeys((INFO, "/collective_rpc", "/pause", "/weight_info"), DEVELOPMENT),
}
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Stated in every request, because a server may have others as defaults, from the folder of its model."""
REFUSED_CONNECTORS = ("Nixl", "MoRIIO", "Mooncake")


class VLLMEngine(OutsideEngine):
    """The trainer's rollout engine on vLLM, 0.28 or newer.

    A server that is started here loads in the background, and the first request waits for it. It is ended with this
    object, or with the trainer. A server of yours needs VLLM_SERVER_DEV_MODE=1, serves this trainer alone, and is left
    running. Weights go through a folder that both can read.

        with VLLMEngine(ServedModel.of(routed), ServerSettings(python=Path("venv-vllm/bin/python"))) as engine:
            engine.load_weights(model.state_dict(), version=0)
            generation = engine.generate(prompts, ...)

    Args:
        model: the policy, as it is served.
        server: how to start one, or the address of yours, such as "http://127.0.0.1:8000".
        weights_folder: for a server of yours, and of one trainer at a time. The server must see it under the same path.
            Checkpoints are put into `foreroute-weights` in it.
        timeout_s: for the start, and for each request.
        at_once: responses under way at once.

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
        self._timeout_s = timeout_s
        self._process: ServerProcess | None = None
        self._max_model_len: int | None = None
        self._has_masks = False
        url, socket = "http://vllm", None
        if isinstance(server, ServerSettings) and weights_folder is None:
            self._max_model_len = server.max_model_len or model.max_positions
            if self._max_model_len is None:
                raise ConfigError(
                    "the model's configuration does not say how long a sequence may be; set max_model_len"
                )
            self._process = ServerProcess(server, model.writer, self._max_model_len)
            socket, weights_folder = self._process.socket, self._process.folder
        elif isinstance(server, str) and weights_folder is not None:
            url = server
        else:
            raise ConfigError("name a weights_folder for a server of yours, and for no other")
        self._client = Client(
            url, timeout_s=timeout_s, what="the vLLM server", socket=socket, at_once=at_once, missing=MISSING
        )
        if self._process is None:
            self._look_at_server()
        self._weights = WeightsFolder(weights_folder, model.writer)

    def close(self) -> None:
        """End the server that was started here, and let go of the folder of weights. May be called again."""
        super().close()
        if self._process is not None:
            self._process.close()

    def _hand_over(self, folder: str, version: int) -> None:
        with self._running(), self._paused():
            loaded = self._client.post("/collective_rpc", {"method": "foreroute_load", "args": [folder]})
            if not (results := loaded.read(list, "results")) or any(each != folder for each in results):
                raise EngineError(f"the server's workers loaded {results!r:.200}, each was asked to load {folder!r}")
            # what is cached was computed, and routed, by the old weights
            if not self._client.post("/reset_prefix_cache", {}).read(bool, "success"):
                raise EngineError("the server could not reset its prefix cache: requests of someone else are running")
            self._client.post("/update_weight_version", {"new_version": str(version)})

    def generate(
        self,
        prompts: Sequence[NDArray[np.int32]],
        sampling: Sampling,
        generator: torch.Generator,
        *,
        known_rows: ArrayLike = 0,
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt; as `embedded.EmbeddedEngine.generate`.

        After `load_weights`, the same state of `generator` gives the same seeds, one for each response.

        Args:
            prompts: integer arrays [T].
            sampling: how.
            generator: the source of randomness.
            known_rows: int [prompts], or one for all: rows at the start of a prompt whose routes are known from an
                earlier turn. The engine does not send them again, and they are absent from the traces:
                `capture.Trajectory` joins both.
        """
        return self._sample(prompts, sampling, generator, starts=known_rows).generation()

    def generate_until(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator, *, seconds: float
    ) -> PartialGeneration:
        """As `generate`, but what is not finished after so many seconds is aborted: whatever runs on the server."""
        return self._sample(prompts, sampling, generator, abort_after=seconds)

    def resume(self, partial: PartialGeneration, sampling: Sampling, generator: torch.Generator) -> PartialGeneration:
        """Go on with the sequences that were aborted, under the weights of now.

        Rows that were routed before stay as they are, with the version that computed them, because the log-probs of
        their tokens come from there.

        Args:
            partial: from `generate_until`.
            sampling: as in `generate_until`; `max_new_tokens` counts what was sampled before too. Each sequence goes on
                alone, whatever the group size.
            generator: as in `generate`.
        """
        samples, open_S = list(partial.samples), np.flatnonzero(~partial.finished_S).tolist()
        if not open_S:
            return partial
        so_far = [samples[s].trace.tokens(0) for s in open_S]
        left = sampling.max_new_tokens - partial.response_lengths[open_S]
        # the engine routes the prefix again to fill its cache; rows that are kept are not asked for
        kept = [samples[s].leading_rows for s in open_S]
        later = self._sample(so_far, replace(sampling, group_size=1), generator, max_tokens=left, starts=kept)
        for s, more in zip(open_S, later.samples, strict=True):
            samples[s] = samples[s].continued_by(more)
        return PartialGeneration(samples)

    def _sample(
        self,
        prompts: Sequence[NDArray[np.int32]],
        sampling: Sampling,
        generator: torch.Generator,
        *,
        max_tokens: NDArray[np.int64] | None = None,
        starts: ArrayLike = 0,
        abort_after: float | None = None,
    ) -> PartialGeneration:
        require_prompts(prompts)
        # one request for each response: vLLM 0.28 returns one of several, and newer ones make as many requests of them
        asked = [prompt for prompt in prompts for _ in range(sampling.group_size)]
        lengths = np.array([len(prompt) for prompt in asked], np.int64)
        limits = np.full(len(prompts), sampling.max_new_tokens) if max_tokens is None else max_tokens
        first = np.asarray(starts)
        if first.dtype.kind not in "iu" or first.shape not in ((), (len(prompts),)):
            raise ConfigError(f"known_rows are {first.dtype} of shape {first.shape}; expected one integer, or one each")
        limits, first = (np.repeat(np.broadcast_to(a, len(prompts)), sampling.group_size) for a in (limits, first))
        if (first < 0).any() or (first >= lengths).any():  # vLLM 0.28 ends where it is asked for no row of a prompt
            raise ConfigError(
                f"known_rows are {first.tolist()[:8]}; expected 0 or more, and fewer than the prompts have tokens: the "
                "last row gives the first sampled token"
            )
        longest = int((lengths + limits).max())
        if self._max_model_len is not None and longest > self._max_model_len:
            raise ConfigError(
                f"prompt and response may take {longest} tokens, max_model_len is {self._max_model_len}; "
                "raise it, or sample fewer tokens"
            )
        with self._running():
            self._require_ready()
            common, name = self._sampling_params(sampling), secrets.token_hex(8)
            bodies = [
                {
                    "request_id": f"{name}-{number}",
                    "token_ids": prompt.tolist(),
                    "sampling_params": {**common, "max_tokens": limit, "seed": seed}
                    # left out where it is 0, as all releases take it
                    | ({"routed_experts_prompt_start": start} if start else {}),
                    "return_token_ids": True,
                }
                for number, (prompt, limit, start, seed) in enumerate(
                    zip(asked, limits.tolist(), first.tolist(), draw_seeds(generator, len(asked)), strict=True)
                )
            ]
            loaded = len(self._loaded)
            # a server that returns masks returns one for every token
            kept = int(common["top_k"]) if self._has_masks else 0
            most = most_bytes_of(self._served, longest, int(limits.max()), most_kept=kept)
            then = None if abort_after is None else (abort_after, "/abort_requests")
            answers = self._client.ask(GENERATE, bodies, most_bytes=most, then=then)
            require_own([self._client.get("/weight_info").read(str, "weight_version")], self._loaded[-1:])
        # weights that change meanwhile are this trainer's, or those of before
        known, echoes = self._loaded[max(0, loaded - 1) :], at_least(self._engine_version, "0.30")
        samples = []
        for answer, body, prompt, limit, start in zip(answers, bodies, asked, limits, first, strict=True):
            given: Any = {"request_id": body["request_id"], "start": int(start), "masks": sampling.truncates}
            response = response_of(answer, prompt, echoes=echoes, **given)
            samples.append(self._sample_of(response, sampling, int(limit)))
            require_own(samples[-1].trace.weight_versions_N[len(prompt) - 1 : -1], known)
        return PartialGeneration(samples)

    def _sampling_params(self, sampling: Sampling) -> dict[str, Any]:
        if sampling.truncates and not self._has_masks:
            raise ConfigError(
                "this engine does not return sampling masks, without which log-probs under top_k, top_p or min_p "
                "cannot be compared; start vLLM with them: sampling_masks of ServerSettings, or "
                "--return-sampling-mask for a server of yours, or leave the three out"
            )
        cuts = self._cuts(sampling) if self._has_masks else {**NEUTRAL, "temperature": sampling.temperature}
        return {
            **cuts,
            **PENALTIES,
            "stop_token_ids": stop_token_ids(sampling),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The server answers; where it was started here and dies, its last words are in the error."""
        process = self._process
        if process is not None and not self._engine_version:
            process.wait(self._client, self._timeout_s)
            self._look_at_server()
        try:
            yield
        except EngineError as error:
            if process is not None and (how := process.death(may_be_near=isinstance(error, BrokenOffError))):
                raise process.ended(f"the vLLM server died ({how}): {error}") from error
            raise

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """No request runs meanwhile; afterwards the server goes on, whatever has happened."""
        try:
            self._client.post("/pause?mode=wait", {})
            yield
        finally:
            self._client.post("/resume", {})

    def _look_at_server(self) -> None:
        """Ask the server how it was started, because a wrong setting gives wrong log-probs without an error."""
        version = self._client.get("/version").read(str, "version")
        require_engine("vLLM", version)
        config = Answer(self._client.get(f"{INFO}?config_format=json").read(dict, "vllm_config"), "vllm_config")
        if missing := missing_settings(config, version):
            raise EngineError(f"the vLLM server must be started with {', and '.join(missing)}")
        self._has_masks = config.read(dict, "model_config").get("return_sampling_mask") is True
        self._engine_version = version


def missing_settings(config: Answer, version: str) -> list[str]:
    """What a server of this release lacks for replay, as arguments or in words.

    Args:
        config: the `vllm_config` of `/server_info`.
        version: of vLLM.

    Raises:
        EngineError: when the configuration lacks what every release has.
    """
    model, parallel, cache = (config.read(dict, f"{name}_config") for name in ("model", "parallel", "cache"))
    newer = at_least(version, "0.31")  # there, routes have a configuration of their own
    routes = config.read(dict, "aux_output_config") if newer else model
    is_cpu = config.read(str, "device_config", "device") == "cpu"
    transfer = config.value.get("kv_transfer_config")
    connector = transfer.get("kv_connector") if isinstance(transfer, dict) else None
    wanted = {
        "--enable-return-routed-experts": routes.get("enable_return_routed_experts") is True,
        "--logprobs-mode processed_logprobs": model.get("logprobs_mode") == "processed_logprobs",
        f"--worker-extension-cls {EXTENSION}": parallel.get("worker_extension_cls") == EXTENSION,
        "--pipeline-parallel-size 1, since stages do not return their routes": (
            parallel.get("pipeline_parallel_size", 1) == 1
        ),
        "--enable-prefix-caching, since routes are kept beside cached blocks": (
            not newer or cache.get("enable_prefix_caching") is True
        ),
        # vLLM dies on a seeded request whose prompt is prefilled in chunks on a CPU
        "--no-enable-chunked-prefill": (
            newer or not is_cpu or not config.read(bool, "scheduler_config", "enable_chunked_prefill")
        ),
        f"another KV connector than {connector!r:.40}, with which no routes are returned": not any(
            name in str(connector) for name in REFUSED_CONNECTORS
        ),
    }
    return [argument for argument, there in wanted.items() if not there]
