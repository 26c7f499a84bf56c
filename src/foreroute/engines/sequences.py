"""Requests to an engine outside the trainer's process, and its responses: checked against each other and decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Sampling, decode
from foreroute.capture.logprobs import NO_LOGPROB
from foreroute.errors import ConfigError, EngineError
from foreroute.mismatch.measures import MOST_LOGPROB
from foreroute.trace import NO_VERSION, RoutingTrace

REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, eq=False)
class Request:
    """One response that an engine is asked for."""

    id: str
    prompt: NDArray[np.int32]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, eq=False)
class Response:
    """An engine's answer to a request, before it is checked."""

    tokens: NDArray[np.int32]  # the sampled ones
    logprobs: NDArray[np.float32]
    logprob_tokens: NDArray[np.int32]  # the tokens that `logprobs` are of
    reason: str  # why it ended, one of `REASONS`
    output: dict[str, Any]  # routes, sampling masks and spans of weights, named as `capture.decode` reads them
    states_versions: bool  # whether the engine says which weights sampled each token

    def to_trace(self, request: Request, model: ServedModel, *, loaded: Sequence[int]) -> RoutingTrace:
        """Check the response against its request and the versions of weights that are `loaded`, and decode it."""
        self._check_tokens(request, model.vocabulary_size)
        self._check_logprobs()
        trace = decode(
            self.output,
            model=model.spec,
            token_ids=np.concatenate([request.prompt, self.tokens]),
            # where the engine states no version, it is that of the weights loaded last
            weight_version=_parse_version if self.states_versions else loaded[-1] if loaded else NO_VERSION,
            vocabulary_size=model.vocabulary_size,
            indexers=model.indexers,
        )
        # row p gives the logits of token p + 1, and the last token's row was never computed
        sampled = trace.weight_versions_N[len(request.prompt) - 1 : -1]
        check_versions({*map(str, sampled)}, loaded)
        if self.states_versions and (sampled == sampled[0]).all():
            # weights that did not change while the response was sampled have computed its prompt too
            return trace.with_weight_version(int(sampled[0]))
        return trace

    def _check_tokens(self, request: Request, vocabulary_size: int | None) -> None:
        tokens, count, end = self.tokens, len(self.tokens), request.sampling.end_token
        limit = request.sampling.max_new_tokens
        unknown = tokens[(tokens < 0) | (tokens >= (vocabulary_size or np.inf))]
        ends = np.flatnonzero(tokens == end)
        if self.reason == "abort":
            # as a whole response it would be trained on as if it ended here
            wrong = "aborted a response: someone else uses the engine, which only this trainer may"
        elif not 1 <= count <= limit:
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

    def _check_logprobs(self) -> None:
        check_echo("the token of each log-prob", self.tokens, self.logprob_tokens)
        if len(self.logprobs) != len(self.tokens):
            raise EngineError(f"the engine returned {len(self.logprobs)} log-probs for {len(self.tokens)} tokens")
        possible = (self.logprobs > NO_LOGPROB) & (self.logprobs <= MOST_LOGPROB)  # False for NaN
        if not possible.all():
            raise EngineError(
                f"the engine returned the log-prob {self.logprobs[int(possible.argmin())]}, which is no logarithm of "
                "a probability; its weights may be damaged"
            )


def count_tokens(prompts: Sequence[NDArray[np.int32]]) -> list[int]:
    """Return the length of each prompt; raise `ConfigError` without a prompt, or for one without a token."""
    lengths = [len(prompt) for prompt in prompts]
    # the first sampled token comes from the row of the prompt's last
    if not lengths or not all(lengths):
        raise ConfigError(
            f"there are {len(lengths)} prompts, of {lengths[:8]} tokens; expected one or more, of one token or more"
        )
    return lengths


def check_echo(what: str, sent: NDArray[np.int32], echoed: NDArray[np.int32]) -> None:
    """Raise `EngineError` when an engine states other tokens than it was sent, or than it sampled."""
    if not np.array_equal(sent, echoed):
        raise EngineError(
            f"the engine says that {what} was {echoed[:8].tolist()}..., expected {sent[:8].tolist()}...: it answers "
            "another request, or puts tokens through a tokenizer or template of its own. Start it on the trainer's "
            "checkpoint, with nothing between"
        )


def check_versions(stated: set[str], loaded: Sequence[int]) -> None:
    """Raise `EngineError` when an engine that was given weights states other versions than those of `loaded`."""
    if loaded and (others := stated - {*map(str, loaded)}):
        raise EngineError(
            f"the engine sampled with weights of version {', '.join(sorted(others)):.80}, the trainer loaded version "
            f"{', '.join(map(str, loaded))}; no one else may change the weights of an engine that a trainer uses"
        )


def _parse_version(name: str) -> int:
    """Return the number that a version of weights is, or `NO_VERSION` for a name such as "default"."""
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else NO_VERSION
