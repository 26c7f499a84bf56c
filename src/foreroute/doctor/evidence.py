"""What is known about a trainer and an engine, what is measured of it, and the form of what is found. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.conformance import ConformanceReport
from foreroute.doctor.zeros import Zeros, denied_zeros
from foreroute.errors import printable
from foreroute.mismatch import (
    Defect,
    Explanation,
    RoutingMismatch,
    TokenMismatch,
    explain,
    routing_mismatch,
    token_mismatch,
)
from foreroute.mismatch.decisions import StreamDifference, stream_difference
from foreroute.mismatch.mixups import MAX_PERMUTED
from foreroute.trace import INDEXER, RoutedLayer, RoutingTrace
from foreroute.trace.checks import as_offsets

NAMES = ("the trainer's own trace", "the engine's trace")
EXPLAINS = 4.0
"""Factor by which another reading of log-probs must be nearer to be believed. Chosen by hand, as what follows."""
FEWEST, SHORTEST = 16, 8
"""Tokens that it takes to believe another reading, and mean length of sequences whose order is looked for."""
APART = 0.05
"""Mean |log r|, in nats, up to which tokens are not those of other sequences."""


@dataclass(frozen=True, eq=False)
class TrainerPass:
    """One pass of the trainer over the sequences.

    Attributes:
        executed: the routes it took, and what its indexers chose where the engine's trace says that too; None where
            only log-probs are known.
        logprobs_R: of the response tokens, sequence after sequence; None where only routes are known.
    """

    executed: RoutingTrace | None
    logprobs_R: NDArray[Any] | None


@dataclass(frozen=True, eq=False)
class Rescored:
    """Log-probs as they would be if the engine had sampled otherwise than was said.

    Attributes:
        temperature: that logits are divided by.
        on_sets: on the sampling masks of the trace; over all tokens otherwise.
        logprobs_R: of the response tokens.
    """

    temperature: float
    on_sets: bool
    logprobs_R: NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What is known. Whatever is None was not looked at.

    Attributes:
        engine: the trace in question.
        engine_logprobs_R: the engine's log-probs of the response tokens.
        response_lengths_S: how many of these each sequence has.
        native: the trainer on its own routes.
        replayed: the trainer on the engine's routes.
        repeated: the trainer on its own routes once more, on the same batches.
        repacked: the trainer on its own routes, one sequence at a time.
        conformance: the quick checks, run on this model.
        attach_error: why the adapter refused the model.
        packed_routers: what packed weights of its routers do, and what to do about them.
        replay_error: why the trace could not be replayed.
        mask_error: why its sampling masks cannot be those of its tokens. Log-probs were compared with nothing then.
        has_indexers: the model has indexers of sparse attention, whose choices can be replayed.
        rescored: log-probs of the trainer on the engine's routes, taken otherwise, where the two are far apart.
        expected_version: the weight version that the trainer is at.
        random_weights: the model was made from a configuration alone, so that only its wiring counts.
    """

    engine: RoutingTrace | None = None
    engine_logprobs_R: NDArray[Any] | None = None
    response_lengths_S: NDArray[np.integer] | None = None
    native: TrainerPass | None = None
    replayed: TrainerPass | None = None
    repeated: TrainerPass | None = None
    repacked: TrainerPass | None = None
    conformance: ConformanceReport | None = None
    attach_error: str = ""
    packed_routers: str = ""
    replay_error: str = ""
    mask_error: str = ""
    has_indexers: bool = False
    rescored: tuple[Rescored, ...] = ()
    expected_version: int | None = None
    random_weights: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Measures:
    """Everything that was measured; None where the evidence is missing.

    Attributes:
        without: engine against trainer on its own routes.
        with_replay: engine against trainer on the engine's routes.
        repeated, repacked: trainer against itself.
        routes: engine's routes against the trainer's own.
        repacked_routes: the trainer's own routes against those when it is packed differently.
        zeros: log-probs of exactly 0 of one side that the other denies.
        ratio: trainer's over engine's probability, mean over tokens and the standard error of that, on the engine's
            routes where those were replayed. It is 1 where both draw from the same tokens, however far apart they are.
            Tokens of `zeros`, and those to which the engine gives 1, are left out.
        rise: by how much replay raises a token's part of k3: the mean over tokens and the standard error of that.
        shift: where the engine's log-probs fit those of the trainer's neighbouring token: by how many tokens they are
            moved, 1 or -1, and the median |log r| with that undone and as they are, in nats.
        order: where they fit those of other sequences: the trainer's sequence in the place of each, and the mean
            |log r| with that undone and as they are, in nats. Neither this nor `shift` is looked for beside `zeros`.
        rescored: the one of `Evidence.rescored` that is nearest to the engine, and its mismatch.
        explanation: what sets engine's and trainer's routes apart.
        choices: of indexers, engine against trainer on its own.
        reordered: the engine's sequences come in another order than the trainer's. Routes are compared in the trainer's
            order; log-probs, whose sequences nothing tells apart, are not compared.
        layers: L, of the routes.
    """

    without: TokenMismatch | None = None
    with_replay: TokenMismatch | None = None
    repeated: TokenMismatch | None = None
    repacked: TokenMismatch | None = None
    routes: RoutingMismatch | None = None
    repacked_routes: RoutingMismatch | None = None
    zeros: tuple[Zeros, ...] = ()
    ratio: tuple[float, float] | None = None
    rise: tuple[float, float] | None = None
    shift: tuple[int, float, float] | None = None
    order: tuple[list[int], float, float] | None = None
    rescored: tuple[Rescored, TokenMismatch] | None = None
    explanation: Explanation | None = None
    choices: StreamDifference | None = None
    reordered: bool = False
    layers: tuple[RoutedLayer, ...] = ()

    @property
    def gain(self) -> float | None:
        """k3 without over k3 with replay; 1 where both are too large for a number."""
        if self.without is None or self.with_replay is None:
            return None
        k3 = [max(each.k3, 1e-12) for each in (self.without, self.with_replay)]
        return 1.0 if k3[0] == k3[1] else k3[0] / k3[1]

    @property
    def floor(self) -> float:
        """The k3 that no replay undercuts: what the trainer shows against itself, packed differently."""
        return max(3 * self.repacked.k3, 1e-9) if self.repacked is not None else 1e-9


class Severity(IntEnum):
    """How bad a finding is."""

    FINE = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: how bad it is.
        topic: "wiring", "weights", "routes", "masks", "temperature", "indexers", "probabilities", "replay", "trainer".
        sentence: what was seen, in plain words and whole sentences.
        advice: what to do, in whole sentences; empty when there is nothing to do.
    """

    severity: Severity
    topic: str
    sentence: str
    advice: str = ""

    def __post_init__(self) -> None:
        """Paths, names of models and errors are quoted: on one line, and as a terminal shows and does not obey them."""
        object.__setattr__(self, "sentence", " ".join(printable(self.sentence).split()))
        object.__setattr__(self, "advice", " ".join(printable(self.advice).split()))


def many(count: int, unit: str) -> str:
    """Say how many of a unit there are."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def measure(evidence: Evidence) -> Measures:
    """The figures of the evidence. A model without weights is compared with nothing but itself.

    Raises:
        SpecMismatchError, BatchMismatchError: when traces of other models or tokens are compared.
        InputError: when log-probs do not fit together.
    """
    native, repacked = evidence.native, evidence.repacked
    own, engine = native.executed if native else None, evidence.engine
    of_itself = Measures(
        repeated=_tokens(evidence.repeated, native.logprobs_R if native else None),
        repacked=_tokens(repacked, native.logprobs_R if native else None),
        repacked_routes=_routes(own, repacked.executed if repacked else None),
    )
    if evidence.random_weights:
        return of_itself
    reordered, explanation = False, None
    if own is not None and engine is not None and own.valid_N.any() and engine.valid_N.any():
        if len(engine.versions) == 1:
            version = engine.versions[0] if evidence.expected_version is None else evidence.expected_version
            own = own.with_weight_version(version)
        explanation = explain(own, engine, names=NAMES)
        reordered = explanation.kind is Defect.PERMUTATION and explanation.parameters.get("with_tokens", False)
        if reordered:
            engine = engine.select(np.argsort(explanation.parameters["order"]))
            explanation = explain(own, engine, names=NAMES)
    logprobs_R = None if reordered else evidence.engine_logprobs_R
    without, with_replay = _tokens(native, logprobs_R), _tokens(evidence.replayed, logprobs_R)
    rescored = _nearest(evidence.rescored, logprobs_R)
    zeros = _zeros(evidence, logprobs_R, rescored)
    return replace(
        of_itself,
        without=without,
        with_replay=with_replay,
        routes=_routes(engine, own) if explanation is not None else None,
        zeros=zeros,
        ratio=_ratio(evidence.replayed or native, logprobs_R, zeros),
        rise=_rise(native, evidence.replayed, logprobs_R),
        # sequences of zeros fit nowhere, and set the others apart
        shift=None if zeros else _shift(evidence.replayed or native, logprobs_R),
        order=None if zeros else _order(evidence.replayed or native, logprobs_R, evidence.response_lengths_S),
        rescored=rescored,
        explanation=explanation,
        choices=_choices(own, engine),
        reordered=reordered,
        layers=engine.spec.layers if engine is not None else (),
    )


def _zeros(
    evidence: Evidence, reference: NDArray[Any] | None, rescored: tuple[Rescored, TokenMismatch] | None
) -> tuple[Zeros, ...]:
    """Those of the engine, beside the nearest reading of the trainer, and those of each pass of the trainer.

    A temperature near 0 has many zeros, which the trainer does not deny once its own log-probs are taken so.
    """
    passes = {"the trainer": evidence.native, "the trainer, under replay,": evidence.replayed}
    own = {name: each.logprobs_R for name, each in passes.items() if each is not None and each.logprobs_R is not None}
    if reference is None or not own:
        return ()
    nearest, lengths_S = (
        list(own.values())[-1] if rescored is None else rescored[0].logprobs_R,
        evidence.response_lengths_S,
    )
    if lengths_S is not None and lengths_S.sum() != len(reference):
        lengths_S = None
    found = [denied_zeros("the engine", "the trainer", reference, nearest, lengths_S)]
    found += [denied_zeros(name, "the engine", logprobs_R, reference, lengths_S) for name, logprobs_R in own.items()]
    return tuple(each for each in found if each is not None)


def _ratio(
    trainer: TrainerPass | None, reference: NDArray[Any] | None, zeros: tuple[Zeros, ...]
) -> tuple[float, float] | None:
    if trainer is None or trainer.logprobs_R is None or reference is None:
        return None
    # nobody can tell whether a probability of 1 was filled in, or one token was left to draw from
    kept_R = ~np.any([np.asarray(reference) == 0, *(each.zero_R for each in zeros)], axis=0)
    log_r = (np.asarray(trainer.logprobs_R, np.float64) - reference)[kept_R]
    return _mean(np.exp(log_r)) if len(log_r) > 1 else None


def _rise(
    native: TrainerPass | None, replayed: TrainerPass | None, reference: NDArray[Any] | None
) -> tuple[float, float] | None:
    passes = [None if each is None else each.logprobs_R for each in (native, replayed)]
    if passes[0] is None or passes[1] is None or reference is None or len(reference) < 2:
        return None
    without, with_replay = (np.asarray(each, np.float64) - reference for each in passes)
    with np.errstate(over="ignore", invalid="ignore"):
        return _mean(np.expm1(with_replay) - with_replay - (np.expm1(without) - without))


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    """And its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)


def _shift(trainer: TrainerPass | None, reference: NDArray[Any] | None) -> tuple[int, float, float] | None:
    """By medians, since one token of each sequence is compared with one of another, where packed tokens are moved."""
    if trainer is None or trainer.logprobs_R is None or reference is None or len(reference) < FEWEST:
        return None
    own_R, size = np.asarray(trainer.logprobs_R, np.float64), len(reference)
    apart = {
        n: float(np.median(np.abs(reference[max(n, 0) : size + n] - own_R[max(-n, 0) : size - n]))) for n in (0, 1, -1)
    }
    best = min(apart, key=lambda n: apart[n])
    return (best, apart[best], apart[0]) if apart[best] * EXPLAINS < apart[0] else None


def _order(
    trainer: TrainerPass | None, reference: NDArray[Any] | None, lengths_S: NDArray[np.integer] | None
) -> tuple[list[int], float, float] | None:
    """By means, with the sequence that fits best in the place of each, where sequences are no shorter than chance fits.

    Rows of a padded batch in another order are cut by the trainer's lengths; packed sequences keep their own.
    """
    if trainer is None or trainer.logprobs_R is None or reference is None or lengths_S is None or not len(reference):
        return None
    starts, own_R = as_offsets(lengths_S.astype(np.int64)), np.asarray(trainer.logprobs_R, np.float64)
    own_S, before = np.split(own_R, starts[1:-1]), float(np.abs(reference - own_R).mean())
    if not 1 < len(own_S) <= MAX_PERMUTED or len(own_R) < SHORTEST * len(own_S) or before < APART:
        return None
    near = before / EXPLAINS
    for packed in (False, True):
        order: list[int] = []
        chosen: list[NDArray[np.float64]] = []
        left, start = set(range(len(own_S))), 0
        for s in range(len(own_S)):
            start = start if packed else starts[s]
            fits = {t: _apart(reference[start : None if packed else starts[s + 1]], own_S[t]) for t in left}
            best = max(left, key=lambda t: ((near - fits[t]).sum(), t == s))
            order.append(best)
            chosen.append(fits[best])
            left.remove(best)
            start += len(own_S[best])
        after = float(np.concatenate(chosen).mean())
        if order != sorted(order) and after < near:
            return order, after, before
    return None


def _apart(engine: NDArray[Any], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """|log r| of the tokens that both have."""
    length = min(len(engine), len(own))
    return np.abs(engine[:length] - own[:length])


def _nearest(rescored: tuple[Rescored, ...], reference: NDArray[Any] | None) -> tuple[Rescored, TokenMismatch] | None:
    if reference is None or not rescored:
        return None
    found = [token_mismatch(one.logprobs_R, reference) for one in rescored]
    best = min(range(len(found)), key=lambda number: found[number].k3)
    return rescored[best], found[best]


def _routes(a: RoutingTrace | None, b: RoutingTrace | None) -> RoutingMismatch | None:
    return None if a is None or b is None else routing_mismatch(a, b)


def _choices(own: RoutingTrace | None, engine: RoutingTrace | None) -> StreamDifference | None:
    """None as well where not both have choices of the same indexers."""
    mine, theirs = (None if trace is None else trace.streams.get(INDEXER) for trace in (own, engine))
    if mine is None or theirs is None or (mine.layers, mine.num_rows) != (theirs.layers, theirs.num_rows):
        return None
    return stream_difference(mine, theirs)


def _tokens(trainer: TrainerPass | None, reference: NDArray[Any] | None) -> TokenMismatch | None:
    """None as well where no token was sampled."""
    if trainer is None or trainer.logprobs_R is None or reference is None:
        return None
    found = token_mismatch(trainer.logprobs_R, reference)
    return found if found.count else None
