"""What every engine does, and what those outside the trainer's process share: their weights and sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Generation, Sampling, decode
from foreroute.capture.arrays import MAX_INT32
from foreroute.errors import ConfigError, EngineError
from foreroute.trace import NO_VERSION, RoutingTrace, concatenate


class Engine(Protocol):
    """What samples: `embedded.EmbeddedEngine`, and the engines of `engines.vllm` and `engines.sglang`."""

    weight_version: int

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over the trainer's weights; what follows is stamped with `version`."""

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt, grouped by prompt."""

    def close(self) -> None:
        """End what was started to sample. May be called again."""


class OutsideEngine:
    """An engine that is sent weights, and stamps what it samples with their version.

    Args:
        model: what it serves.

    Attributes:
        weight_version: the version last loaded; every row is stamped with it.
    """

    _without_masks = ""
    """What to do to have sampling masks returned, where they are not."""

    def __init__(self, model: ServedModel) -> None:
        if not isinstance(model, ServedModel):
            raise ConfigError(
                f"an engine outside the trainer serves a ServedModel, not a {type(model).__name__}; pass "
                "ServedModel.of(hf.attach(model)) or ServedModel.at(folder), from foreroute.adapters.checkpoint"
            )
        self.weight_version = NO_VERSION
        self._served = model
        self._half_loaded = False

    @contextmanager
    def _loading(self, version: int) -> Iterator[None]:
        """The engine has weights of this version if what is done inside succeeds, and unknown ones if it fails."""
        self._half_loaded = True
        yield
        self.weight_version, self._half_loaded = version, False

    def _require_ready(self, sampling: Sampling) -> None:
        """Raise `EngineError` when it is not known which weights the engine has.

        Raises:
            ConfigError: when tokens are to be left out, and the engine does not say from which ones it drew.
        """
        if sampling.truncates and self._without_masks:
            raise ConfigError(
                "this engine does not return sampling masks, without which log-probs under top_k, top_p or min_p "
                f"cannot be compared; {self._without_masks}, or leave them out"
            )
        if self._half_loaded:
            raise EngineError(
                "the engine's weights are unknown, since loading the last ones failed half way; call load_weights again"
            )

    def _cuts(self, sampling: Sampling, *, most: int = MAX_INT32) -> dict[str, float]:
        """Give temperature, top_k, top_p and min_p as engines that return masks take them.

        They need a top_k, which bounds a mask, and a temperature: that of all tokens, and 1 for the most probable one.

        Args:
            sampling: how to sample.
            most: ids that a mask may have.

        Raises:
            ConfigError: when a mask could have more.
        """
        greedy = sampling.temperature == 0
        top_k = 1 if greedy else sampling.top_k or self._served.vocabulary_size or most + 1
        if top_k > most:
            raise ConfigError(
                f"top_k is {sampling.top_k}, and masks may have {most} tokens of {self._served.vocabulary_size}; set "
                f"top_k to {most} at most"
            )
        temperature = 1.0 if greedy else sampling.temperature
        return {"temperature": temperature, "top_k": top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """One sequence of an engine.

    Attributes:
        prompt: int32 [P], what the engine was given.
        response: int32 [R], what it sampled.
        logprobs: float32 [R].
        output: what carries routes and sampling masks, in a form that `capture.decode` reads; None when nothing ran.
        start: the position of the first row in it.
        finished: False when it was aborted.
    """

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    output: Any
    start: int = 0
    finished: bool = True

    def trace(self, model: ServedModel, *, weight_version: int, engine: str, engine_version: str) -> RoutingTrace:
        """The routes of this sequence, checked.

        Raises:
            EngineError: when there is not one finite log-prob for each token, or a token is none of the model's.
            CaptureError: when the routes are missing, misplaced, or cannot be true.
        """
        if len(self.logprobs) != len(self.response):
            raise EngineError(f"the engine returned {len(self.logprobs)} log-probs for {len(self.response)} tokens")
        if not np.isfinite(self.logprobs).all():
            raise EngineError("the engine returned a log-prob that is no finite number; its weights may be damaged")
        _require_known(self.response, model.vocabulary_size)
        tokens = np.concatenate([self.prompt, self.response])
        if self.output is None and not self.finished:
            return RoutingTrace.unrouted(model.spec, [tokens])
        decoded = decode(
            self.output,
            model=model.spec,
            token_ids=tokens,
            start=self.start,
            weight_version=weight_version,
            vocabulary_size=model.vocabulary_size,
            indexers=model.indexers,
        )
        return decoded.with_provenance(engine=engine, engine_version=engine_version)


def generation_of(
    sequences: Sequence[SampledSequence], model: ServedModel, *, weight_version: int, engine: str, engine_version: str
) -> Generation:
    """All sequences, in order, for training. Raises as `SampledSequence.trace`, and for one that was aborted."""
    require_finished([s.finished for s in sequences])
    traces = [
        s.trace(model, weight_version=weight_version, engine=engine, engine_version=engine_version) for s in sequences
    ]
    return Generation(
        concatenate(traces),
        np.array([len(s.prompt) for s in sequences], np.int64),
        np.concatenate([s.logprobs for s in sequences]),
    )


def draw_seeds(generator: torch.Generator, count: int) -> NDArray[np.int64]:
    """int64 [count], a seed for each request. Engines add the number of the response within its group."""
    return torch.randint(1 << 31, (count,), generator=generator).numpy()


def stop_token_ids(sampling: Sampling) -> list[int]:
    """The tokens that end a response; vLLM refuses numbers outside of its vocabulary, such as -1 for none."""
    return [sampling.end_token] if sampling.end_token >= 0 else []


def require_finished(finished_S: Sequence[bool]) -> None:
    """Raise `EngineError` when a sequence was aborted: as a whole response it would be trained on as if it ended so."""
    if not all(finished_S):
        raise EngineError(
            f"the engine aborted response {list(finished_S).index(False)} of {len(finished_S)}; no one else may use an "
            "engine that a trainer uses"
        )


def require_same_prompt(sent: NDArray[np.int32], echoed: NDArray[np.int32]) -> None:
    """Raise `EngineError` when an engine says that it was given another prompt than it was sent."""
    if not np.array_equal(sent, echoed):
        raise EngineError(
            f"the engine ran on the prompt {echoed[:8].tolist()}..., it was sent {sent[:8].tolist()}...: it puts "
            "prompts through a tokenizer or template of its own. Start it on the trainer's checkpoint, with nothing "
            "between"
        )


def _require_known(tokens: NDArray[np.int32], vocabulary_size: int | None) -> None:
    unknown = np.flatnonzero((tokens < 0) | (tokens >= (vocabulary_size or np.inf)))
    if len(unknown):
        raise EngineError(
            f"the engine sampled token {tokens[unknown[0]]}, the policy knows those below {vocabulary_size}: "
            "the engine runs another model or vocabulary. Start it on the trainer's checkpoint"
        )


def require_version(stated: object, expected: int) -> None:
    """Raise `EngineError` unless an engine that was given weights sampled with those."""
    if expected != NO_VERSION and stated != str(expected):
        raise EngineError(
            f"the engine sampled with weights of version {stated!r:.40}, the trainer loaded version {expected}; "
            "no one else may change the weights of an engine that a trainer uses"
        )
