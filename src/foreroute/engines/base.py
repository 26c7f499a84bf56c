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
from foreroute.mismatch.measures import MOST_LOGPROB
from foreroute.trace import NO_VERSION, RoutingTrace, concatenate

NO_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that it has none of, or that is no number."""
SLACK_BYTES, BYTES_OF_LOGPROB = 1 << 20, 512
"""Of an answer without tokens, and of what is said of a sampled one beside its routes."""


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
        reason: why it ended: "stop", "length" or "abort".
        output: what carries routes and sampling masks, in a form that `capture.decode` reads; None when nothing ran.
        start: the position of the first row in it.
    """

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reason: str
    output: Any
    start: int = 0

    @property
    def finished(self) -> bool:
        """False when it was aborted."""
        return self.reason != "abort"

    def checked(self, sampling: Sampling, vocabulary_size: int | None, *, max_new_tokens: int) -> SampledSequence:
        """The sequence, held against what was asked for.

        Args:
            sampling: how it was to be sampled.
            vocabulary_size: tokens that the policy knows; None when that is not known.
            max_new_tokens: the most tokens that were asked for.

        Raises:
            EngineError: when it ends elsewhere than it says or may, has a token that is none of the model's, or a
                log-prob that cannot be.
        """
        response, count = self.response, len(self.response)
        if count > max_new_tokens or (not count and self.finished):
            raise EngineError(f"the engine sampled {count} tokens, it was asked for 1 to {max_new_tokens}")
        _require_known(response, vocabulary_size)
        ends = np.flatnonzero(response == sampling.end_token)
        if len(ends) and ends[0] != count - 1:
            raise EngineError(
                f"the engine sampled {count - 1 - ends[0]} tokens behind the end token {sampling.end_token}; it must "
                "stop there"
            )
        if self.reason == "stop" and not len(ends):
            raise EngineError(
                f"the engine says that a response ended by an end token, and its last token is {response[-1]}, not "
                f"{sampling.end_token}: it stops at others too. Look at eos_token_id of the checkpoint it serves"
            )
        if self.reason == "length" and count != max_new_tokens:
            raise EngineError(
                f"the engine ended a response for its length after {count} of {max_new_tokens} tokens; give it room "
                "for prompt and response, or sample fewer"
            )
        if len(self.logprobs) != count:
            raise EngineError(f"the engine returned {len(self.logprobs)} log-probs for {count} tokens")
        possible_R = (self.logprobs > NO_LOGPROB) & (self.logprobs <= MOST_LOGPROB)  # NaN is neither
        if not possible_R.all():
            raise EngineError(
                f"the engine returned the log-prob {self.logprobs[int(possible_R.argmin())]}, which is no logarithm of "
                "a probability; its weights may be damaged"
            )
        return self

    def trace(self, model: ServedModel, *, weight_version: int, engine: str, engine_version: str) -> RoutingTrace:
        """The routes of this sequence, checked.

        Raises:
            CaptureError: when the routes are missing, misplaced, or cannot be true.
        """
        tokens = np.concatenate([self.prompt, self.response])
        if self.output is None and not self.finished:
            return RoutingTrace.unrouted(model.spec, [tokens])
        states_versions = bool(isinstance(self.output, dict) and self.output.get("weight_versions"))
        decoded = decode(
            self.output,
            model=model.spec,
            token_ids=tokens,
            start=self.start,
            weight_version=version_named if states_versions else weight_version,
            vocabulary_size=model.vocabulary_size,
            indexers=model.indexers,
        )
        sampled_R = decoded.weight_versions_N[len(self.prompt) - 1 : -1]
        if states_versions and (sampled_R == sampled_R[0]).all():
            # the rows before are of the same weights, which never changed
            decoded = decoded.with_weight_version(int(sampled_R[0]))
        return decoded.with_provenance(engine=engine, engine_version=engine_version)


def version_named(name: str) -> int:
    """The number of weights that an engine names; `NO_VERSION` for a name that none was given, such as "default"."""
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else NO_VERSION


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


def most_bytes_of(model: ServedModel, tokens: int, sampled: int, *, most_kept: int = 0) -> int:
    """The most bytes that an answer in JSON may have: ids in base64 for each token, log-probs, and tokens of masks.

    Args:
        model: what is served.
        tokens: of prompts and responses.
        sampled: of these, how many at most are sampled.
        most_kept: tokens of the set that a sampled one was drawn from, where these come too.
    """
    spec, indexers = model.spec, model.indexers
    ids = (max(layer.index for layer in spec.layers) + 1) * spec.top_k
    if indexers is not None:
        ids += (max(layer.index for layer in indexers.layers) + 1) * indexers.top_k
    # four bytes of an id are 5.3 letters; layers of drafts may come behind the decoder's
    return SLACK_BYTES + tokens * (12 * ids + 16) + sampled * (BYTES_OF_LOGPROB + 12 * most_kept)


def draw_seeds(generator: torch.Generator, count: int) -> list[int]:
    """A seed for each request. Engines add the number of the response within its group."""
    seeds: list[int] = torch.randint(1 << 31, (count,), generator=generator).tolist()
    return seeds


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


def require_same_tokens(what: str, sent: NDArray[np.int32], echoed: NDArray[np.int32]) -> None:
    """Raise `EngineError` when an engine states other tokens than it was sent, or than it sampled."""
    if not np.array_equal(sent, echoed):
        raise EngineError(
            f"the engine says that {what} was {echoed[:8].tolist()}..., expected {sent[:8].tolist()}...: it answers "
            "another request, or puts tokens through a tokenizer or template of its own. Start it on the trainer's "
            "checkpoint, with nothing between"
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
