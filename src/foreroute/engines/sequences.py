"""What an engine outside the trainer is asked and answers: held against each other, decoded, and gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Generation, Sampling, decode
from foreroute.errors import ConfigError, EngineError
from foreroute.mismatch.measures import MOST_LOGPROB
from foreroute.trace import NO_VERSION, RoutingTrace

NO_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that it has none of, or that is no number."""
REASONS = ("stop", "length", "abort")


def lengths_of(prompts: Sequence[NDArray[np.int32]]) -> list[int]:
    """The tokens of each prompt.

    Raises:
        ConfigError: without a prompt, and for one without a token, whose row gives the first sampled one.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or not all(lengths):
        raise ConfigError(
            f"there are {len(lengths)} prompts, of {lengths[:8]} tokens; expected one or more, of one token or more"
        )
    return lengths


@dataclass(frozen=True, eq=False)
class Request:
    """One response that an engine is asked for.

    Attributes:
        id: of the request.
        prompt: int32 [P].
        sampling: how it is sampled.
        limit: the most tokens that may be sampled.
        seed: of the engine's random numbers.
        start: the position of the first row that is wanted.
    """

    id: str
    prompt: NDArray[np.int32]
    sampling: Sampling
    limit: int
    seed: int
    start: int = 0


@dataclass(frozen=True, eq=False)
class PartialGeneration:
    """S sequences, of which some were aborted and may be resumed.

    Attributes:
        trace: their tokens (prompt, then what was sampled so far) and routes; rows keep the version that computed them.
        prompt_lengths: int64 [S], tokens of the prompts.
        logprobs: S arrays float32 [R], of the sampled tokens.
        finished_S: bool [S], False for those that were aborted.
    """

    trace: RoutingTrace
    prompt_lengths: NDArray[np.int64]
    logprobs: Sequence[NDArray[np.float32]]
    finished_S: NDArray[np.bool_]

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """int64 [S], tokens sampled so far."""
        return np.array([len(each) for each in self.logprobs], np.int64)

    def generation(self) -> Generation:
        """All sequences, for training.

        Raises:
            EngineError: when one was aborted: as a whole response it would be trained on as if it ended so.
        """
        if not self.finished_S.all():
            raise EngineError(
                f"the engine aborted response {int(self.finished_S.argmin())} of {len(self.trace)}: resume it. Where "
                "it was not to be aborted, someone else uses the engine, which only this trainer may"
            )
        return Generation(self.trace, self.prompt_lengths, np.concatenate(self.logprobs))


@dataclass(frozen=True, eq=False)
class Response:
    """What an engine answers to a request.

    Attributes:
        tokens: int32 [R], what it sampled.
        logprobs: float32 [R].
        logprob_tokens: int32 [R], which tokens these are of.
        reason: why it ended: "stop", "length" or "abort".
        output: routes, sampling masks and spans of weights by the names that `capture.decode` reads; nothing when it
            ended before a forward.
        states_versions: whether the engine says which weights sampled each token.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    logprob_tokens: NDArray[np.int32]
    reason: str
    output: dict[str, Any]
    states_versions: bool

    def trace(self, request: Request, model: ServedModel, *, loaded: Sequence[int]) -> RoutingTrace:
        """The sequence, held against what was asked for, and decoded.

        Args:
            request: that it answers.
            model: what is served.
            loaded: the weights that it may have been sampled with; none when that is not known. The last are those of
                rows of which the engine states nothing.

        Raises:
            EngineError: when it ends elsewhere than it says or may, has a token that is none of the model's, a log-prob
                that cannot be or is of another token, or was sampled with other weights.
            CaptureError: when the routes are missing, misplaced, or cannot be true.
        """
        self._require_tokens(request, model.vocabulary_size)
        self._require_logprobs()
        tokens, version = np.concatenate([request.prompt, self.tokens]), loaded[-1] if loaded else NO_VERSION
        if not self.output:
            return RoutingTrace.unrouted(model.spec, [tokens])
        trace = decode(
            self.output,
            model=model.spec,
            token_ids=tokens,
            start=request.start,
            weight_version=_version_named if self.states_versions else version,
            vocabulary_size=model.vocabulary_size,
            indexers=model.indexers,
        )
        sampled_R = trace.weight_versions_N[len(request.prompt) - 1 : -1]
        require_own({*map(str, sampled_R)}, loaded)
        if self.states_versions and (sampled_R == sampled_R[0]).all():
            # the rows before are of the same weights, which never changed
            return trace.with_weight_version(int(sampled_R[0]))
        return trace

    def _require_tokens(self, request: Request, vocabulary_size: int | None) -> None:
        tokens, count, limit, end = self.tokens, len(self.tokens), request.limit, request.sampling.end_token
        unknown = tokens[(tokens < 0) | (tokens >= (vocabulary_size or np.inf))]
        ends = np.flatnonzero(tokens == end)
        if count > limit or (not count and self.reason != "abort"):
            wrong = f"sampled {count} tokens, it was asked for 1 to {limit}"
        elif len(unknown):
            wrong = (
                f"sampled token {unknown[0]}, the policy knows those below {vocabulary_size}: the engine runs another "
                "model or vocabulary. Start it on the trainer's checkpoint"
            )
        elif self.reason not in REASONS:
            wrong = f"ended a response for the reason {self.reason!r:.40}; expected {REASONS}"
        elif len(ends) and ends[0] != count - 1:
            wrong = f"sampled {count - 1 - ends[0]} tokens behind the end token {end}; it must stop there"
        elif self.reason == "stop" and not len(ends):
            wrong = (
                f"says that a response ended by an end token, and its last token is {tokens[-1]}, not {end}: it stops "
                "at others too. Look at eos_token_id of the checkpoint it serves"
            )
        elif self.reason == "length" and count != limit:
            wrong = (
                f"ended a response for its length after {count} of {limit} tokens; give it room for prompt and "
                "response, or sample fewer"
            )
        else:
            return
        raise EngineError(f"the engine {wrong}")

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


def _version_named(name: str) -> int:
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


def require_own(stated: set[str], loaded: Sequence[int]) -> None:
    """Raise `EngineError` when an engine that was given weights has, or sampled with, others than those of `loaded`."""
    if loaded and (others := stated - {*map(str, loaded)}):
        raise EngineError(
            f"the engine sampled with weights of version {', '.join(sorted(others)):.80}, the trainer loaded version "
            f"{', '.join(map(str, loaded))}; no one else may change the weights of an engine that a trainer uses"
        )
