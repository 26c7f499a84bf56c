"""What an engine outside the trainer sampled: held against what was asked, decoded, and gone on with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Generation, Sampling, decode
from foreroute.errors import EngineError
from foreroute.mismatch.measures import MOST_LOGPROB
from foreroute.trace import NO_VERSION, RoutingTrace, concatenate, extended

NO_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that it has none of, or that is no number."""
REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence that an engine sampled.

    Attributes:
        trace: its tokens (prompt, then what was sampled so far) and routes.
        prompt_length: tokens of the prompt.
        logprobs: float32 [R], of the sampled tokens.
        finished: False when it was aborted.
    """

    trace: RoutingTrace
    prompt_length: int
    logprobs: NDArray[np.float32]
    finished: bool

    @property
    def leading_rows(self) -> int:
        """How many rows at the start are routed."""
        return int(np.logical_and.accumulate(self.trace.valid_N).sum())

    def continued_by(self, later: Sample) -> Sample:
        """The same sequence, gone on with as `later` has it. Rows that are routed stay as they are."""
        logprobs = np.concatenate([self.logprobs, later.logprobs])
        return Sample(extended(self.trace, later.trace), self.prompt_length, logprobs, later.finished)


@dataclass(frozen=True, eq=False)
class PartialGeneration:
    """S sequences, of which some were aborted and may be resumed.

    Attributes:
        samples: the sequences; rows of their traces keep the version that computed them.
    """

    samples: Sequence[Sample]

    @property
    def finished_S(self) -> NDArray[np.bool_]:
        """Bool [S], False for those that were aborted."""
        return np.array([sample.finished for sample in self.samples])

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """int64 [S], tokens sampled so far."""
        return np.array([len(sample.logprobs) for sample in self.samples], np.int64)

    def generation(self) -> Generation:
        """All sequences, for training.

        Raises:
            EngineError: when one was aborted: as a whole response it would be trained on as if it ended so.
        """
        if not self.finished_S.all():
            raise EngineError(
                f"the engine aborted response {int(self.finished_S.argmin())} of {len(self.samples)}: resume it. Where "
                "it was not to be aborted, someone else uses the engine, which only this trainer may"
            )
        return Generation(
            concatenate([sample.trace for sample in self.samples]),
            np.array([sample.prompt_length for sample in self.samples], np.int64),
            np.concatenate([sample.logprobs for sample in self.samples]),
        )


@dataclass(frozen=True, eq=False)
class Response:
    """What an engine says of one sequence.

    Attributes:
        prompt: int32 [P], what the engine was given.
        tokens: int32 [R], what it sampled.
        logprobs: float32 [R].
        logprob_tokens: int32 [R], which tokens these are of.
        reason: why it ended: "stop", "length" or "abort".
        output: what carries routes and sampling masks, in a form that `capture.decode` reads; None when nothing ran.
        start: the position of the first row in it.
    """

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    logprob_tokens: NDArray[np.int32]
    reason: str
    output: Any
    start: int = 0

    def sample(
        self, model: ServedModel, sampling: Sampling, *, max_new_tokens: int, weight_version: int, **engine: str
    ) -> Sample:
        """The sequence, held against what was asked for, and decoded.

        Args:
            model: what is served.
            sampling: how it was to be sampled.
            max_new_tokens: the most tokens that were asked for.
            weight_version: of the rows, where the engine does not state one for each.
            engine: its name and version, for the provenance.

        Raises:
            EngineError: when it ends elsewhere than it says or may, has a token that is none of the model's, or a
                log-prob that cannot be or is of another token.
            CaptureError: when the routes are missing, misplaced, or cannot be true.
        """
        self._require_tokens(model.vocabulary_size, max_new_tokens)
        self._require_end(sampling.end_token, max_new_tokens)
        self._require_logprobs()
        trace = self._trace(model, weight_version).with_provenance(**engine)
        return Sample(trace, len(self.prompt), self.logprobs, self.reason != "abort")

    def _require_tokens(self, vocabulary_size: int | None, max_new_tokens: int) -> None:
        if len(self.tokens) > max_new_tokens or (not len(self.tokens) and self.reason != "abort"):
            raise EngineError(f"the engine sampled {len(self.tokens)} tokens, it was asked for 1 to {max_new_tokens}")
        unknown = np.flatnonzero((self.tokens < 0) | (self.tokens >= (vocabulary_size or np.inf)))
        if len(unknown):
            raise EngineError(
                f"the engine sampled token {self.tokens[unknown[0]]}, the policy knows those below {vocabulary_size}: "
                "the engine runs another model or vocabulary. Start it on the trainer's checkpoint"
            )

    def _require_end(self, end_token: int, max_new_tokens: int) -> None:
        count, ends = len(self.tokens), np.flatnonzero(self.tokens == end_token)
        if self.reason not in REASONS:
            raise EngineError(f"the engine ended a response for the reason {self.reason!r:.40}; expected {REASONS}")
        if len(ends) and ends[0] != count - 1:
            raise EngineError(
                f"the engine sampled {count - 1 - ends[0]} tokens behind the end token {end_token}; it must stop there"
            )
        if self.reason == "stop" and not len(ends):
            raise EngineError(
                f"the engine says that a response ended by an end token, and its last token is {self.tokens[-1]}, not "
                f"{end_token}: it stops at others too. Look at eos_token_id of the checkpoint it serves"
            )
        if self.reason == "length" and count != max_new_tokens:
            raise EngineError(
                f"the engine ended a response for its length after {count} of {max_new_tokens} tokens; give it room "
                "for prompt and response, or sample fewer"
            )

    def _require_logprobs(self) -> None:
        require_same_tokens("the token of each log-prob", self.tokens, self.logprob_tokens)
        if len(self.logprobs) != len(self.tokens):
            raise EngineError(f"the engine returned {len(self.logprobs)} log-probs for {len(self.tokens)} tokens")
        possible_R = (self.logprobs > NO_LOGPROB) & (self.logprobs <= MOST_LOGPROB)  # NaN is neither
        if not possible_R.all():
            raise EngineError(
                f"the engine returned the log-prob {self.logprobs[int(possible_R.argmin())]}, which is no logarithm of "
                "a probability; its weights may be damaged"
            )

    def _trace(self, model: ServedModel, weight_version: int) -> RoutingTrace:
        tokens = np.concatenate([self.prompt, self.tokens])
        if self.output is None and self.reason == "abort":
            return RoutingTrace.unrouted(model.spec, [tokens])
        states_versions = bool(isinstance(self.output, dict) and self.output.get("weight_versions"))
        trace = decode(
            self.output,
            model=model.spec,
            token_ids=tokens,
            start=self.start,
            weight_version=version_named if states_versions else weight_version,
            vocabulary_size=model.vocabulary_size,
            indexers=model.indexers,
        )
        sampled_R = trace.weight_versions_N[len(self.prompt) - 1 : -1]
        if states_versions and (sampled_R == sampled_R[0]).all():
            # the rows before are of the same weights, which never changed
            return trace.with_weight_version(int(sampled_R[0]))
        return trace


def version_named(name: str) -> int:
    """The number of weights that an engine names; `NO_VERSION` for a name that none was given, such as "default"."""
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else NO_VERSION


def require_same_tokens(what: str, sent: NDArray[np.int32], echoed: NDArray[np.int32]) -> None:
    """Raise `EngineError` when an engine states other tokens than it was sent, or than it sampled."""
    if not np.array_equal(sent, echoed):
        raise EngineError(
            f"the engine says that {what} was {echoed[:8].tolist()}..., expected {sent[:8].tolist()}...: it answers "
            "another request, or puts tokens through a tokenizer or template of its own. Start it on the trainer's "
            "checkpoint, with nothing between"
        )


def require_own(stated: Iterable[object], loaded: Sequence[int]) -> None:
    """Raise `EngineError` when an engine that was given weights sampled with others than those of `loaded`."""
    if loaded and (others := {*map(str, stated)} - {*map(str, loaded)}):
        raise EngineError(
            f"the engine sampled with weights of version {', '.join(sorted(others)):.80}, the trainer loaded version "
            f"{', '.join(map(str, loaded))}; no one else may change the weights of an engine that a trainer uses"
        )
