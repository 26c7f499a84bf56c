"""Facts and measurements of a trainer and an engine, and the form of findings. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.conformance import ConformanceReport
from foreroute.doctor.attribution import Attribution
from foreroute.doctor.zeros import Zeros, denied_zeros
from foreroute.errors import InputError, printable
from foreroute.mismatch import (
    Defect,
    Explanation,
    K3Split,
    RootMismatch,
    RoutingMismatch,
    TokenMismatch,
    explain,
    root_mismatch,
    routing_mismatch,
    split_k3,
    token_mismatch,
)
from foreroute.mismatch.decisions import StreamDifference, stream_difference
from foreroute.mismatch.mixups import MAX_PERMUTED
from foreroute.trace import INDEXER, RoutedLayer, RoutingTrace

NAMES = ("the trainer's own trace", "the engine's trace")
EXPLAINS = 4.0
"""Factor by which another reading of log-probs must be nearer to be believed. Chosen by hand, as what follows."""
FEWEST = 16
"""Tokens that it takes to believe a shift."""
SHORTEST = 8
"""Mean length of sequences whose order is looked for."""
APART = 0.05
"""Mean |log r|, in nats, up to which log-probs are not those of other sequences."""


@dataclass(frozen=True, eq=False)
class TrainerPass:
    """One pass of the trainer over the sequences.

    Attributes:
        executed: the routes it took, and what its indexers chose where the engine's trace says that too; None where
            only log-probs are known.
        logprobs_R: of the response tokens, sequence after sequence; None where only routes are known.
        native: in a pass on the engine's routes, what routers would choose by themselves.
        deficits_NL: of every row of `native`, as `Recording.deficits_NL`.
    """

    executed: RoutingTrace | None
    logprobs_R: NDArray[Any] | None
    native: RoutingTrace | None = None
    deficits_NL: NDArray[Any] | None = None


@dataclass(frozen=True, eq=False)
class Rescored:
    """Log-probs as they would be if the engine had sampled otherwise than was said."""

    temperature: float  # that logits are divided by
    on_sets: bool  # on the sampling masks of the trace; over all tokens otherwise
    logprobs_R: NDArray[Any]  # of the response tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Evidence about a trainer and an engine. Whatever is None was not looked at.

    Attributes:
        engine: the trace in question.
        engine_logprobs_R: the engine's log-probs of the response tokens.
        response_lengths_S: how many of these each sequence has.
        prompt_lengths_S: how many tokens of the engine's trace come before the first of them.
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
        attribution: which layers and flips make the gap, by `doctor.explain.explain`.
    """

    engine: RoutingTrace | None = None
    engine_logprobs_R: NDArray[Any] | None = None
    response_lengths_S: NDArray[np.integer] | None = None
    prompt_lengths_S: NDArray[np.integer] | None = None
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
    attribution: Attribution | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Measures:
    """The figures of the evidence; None where it is missing."""

    without: TokenMismatch | None = None  # engine against trainer on its own routes
    with_replay: TokenMismatch | None = None  # engine against trainer on the engine's routes
    # trainer against itself
    repeated: TokenMismatch | None = None
    repacked: TokenMismatch | None = None
    routes: RoutingMismatch | None = None  # engine's routes against the trainer's own
    # the trainer's own routes against those when it is packed differently
    repacked_routes: RoutingMismatch | None = None
    zeros: tuple[Zeros, ...] = ()  # log-probs of exactly 0 of one side that the other denies
    # trainer's over engine's probability, mean over tokens and the standard error of that, on the engine's routes where
    # those were replayed, and read as `rescored` where that is known. It is 1 where both draw from the same tokens,
    # however far apart they are. Tokens of `zeros`, and those to which the engine gives 1, are left out.
    ratio: tuple[float, float] | None = None
    # by how much replay raises a token's part of k3: the mean over tokens and the standard error of that
    rise: tuple[float, float] | None = None
    # where the engine's log-probs fit those of the trainer's neighbouring token: by how many tokens they are moved, 1
    # or -1, and the median |log r| with that undone and as they are, in nats
    shift: tuple[int, float, float] | None = None
    # where they fit those of other sequences: the trainer's sequence in the place of each, and the mean |log r| with
    # that undone and as they are, in nats. Neither this nor `shift` is looked for beside `zeros`.
    order: tuple[list[int], float, float] | None = None
    # the one of `Evidence.rescored` that is nearest to the engine, and its mismatch
    rescored: tuple[Rescored, TokenMismatch] | None = None
    roots: RootMismatch | None = None  # decisions that the trainer would take otherwise on the engine's routes too
    split: K3Split | None = None  # k3 of `without` in routing and the rest
    attribution: Attribution | None = None  # `Evidence.attribution`
    explanation: Explanation | None = None  # what sets engine's and trainer's routes apart
    choices: StreamDifference | None = None  # of indexers, engine against trainer on its own
    # the engine's sequences come in another order than the trainer's. Routes are compared in the trainer's order, and
    # log-probs, whose sequences nothing tells apart, are not.
    reordered: bool = False
    layers: tuple[RoutedLayer, ...] = ()  # L, of the routes

    @property
    def gain(self) -> float | None:
        """k3 without over k3 with replay; 1 where both are too large for a number."""
        if self.without is None or self.with_replay is None:
            return None
        # a ratio of two numbers that are all rounding says nothing
        k3 = [max(each.k3, 1e-12) for each in (self.without, self.with_replay)]
        return 1.0 if k3[0] == k3[1] else k3[0] / k3[1]

    @property
    def floor(self) -> float:
        """The noise floor: k3 of the trainer against itself under another packing, which no replay undercuts."""
        return max(3 * self.repacked.k3, 1e-9) if self.repacked is not None else 1e-9


class Severity(IntEnum):
    """Severity of a finding."""

    FINE = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True)
class Finding:
    """A finding.

    Attributes:
        severity: how bad it is.
        topic: "wiring", "weights", "routes", "masks", "temperature", "indexers", "probabilities", "replay", "gap",
            "trainer".
        sentence: what was seen, in plain words and whole sentences.
        advice: what to do, in whole sentences; empty when there is nothing to do.
    """

    severity: Severity
    topic: str
    sentence: str
    advice: str = ""

    def __post_init__(self) -> None:
        # names of models and errors are quoted in them, which may hold what a terminal would obey
        object.__setattr__(self, "sentence", " ".join(printable(self.sentence).split()))
        object.__setattr__(self, "advice", " ".join(printable(self.advice).split()))


def many(count: int, unit: str) -> str:
    """Say how many of a unit there are."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def measure(evidence: Evidence) -> Measures:
    """Take the figures of the evidence. A model without weights is compared with nothing but itself.

    Raises:
        SpecMismatchError, BatchMismatchError: when traces of other models or tokens are compared.
        InputError: when log-probs do not fit together.
    """
    # what the trainer says of itself needs no engine
    native, repacked, engine = evidence.native, evidence.repacked, evidence.engine
    own, own_R = (native.executed, native.logprobs_R) if native is not None else (None, None)
    of_itself = Measures(
        repeated=_tokens(evidence.repeated, own_R),
        repacked=_tokens(repacked, own_R),
        repacked_routes=None
        if own is None or repacked is None or repacked.executed is None
        else routing_mismatch(own, repacked.executed),
    )
    if evidence.random_weights:
        return of_itself
    reordered, explanation, routes = False, None, None
    if own is not None and engine is not None and own.valid_N.any() and engine.valid_N.any():
        if len(engine.versions) == 1:
            # a pass of the trainer says no version, and a stale trace is a finding of its own
            version = engine.versions[0] if evidence.expected_version is None else evidence.expected_version
            own = own.with_weight_version(version)
        explanation = explain(own, engine, names=NAMES)
        reordered = explanation.defect is Defect.PERMUTATION and explanation.parameters.get("with_tokens", False)
        if reordered:
            # in one order, so that a second defect is seen too
            engine = engine.select(np.argsort(explanation.parameters["order"]))
            explanation = explain(own, engine, names=NAMES)
        routes = routing_mismatch(engine, own)
    found = replace(
        of_itself,
        routes=routes,
        explanation=explanation,
        choices=_choices(own, engine),
        # a replay in another order was refused
        roots=None if reordered else _roots(evidence),
        attribution=evidence.attribution,
        reordered=reordered,
        layers=engine.spec.layers if engine is not None else (),
    )
    # log-probs have no tokens beside them that would tell how to sort them
    return found if evidence.engine_logprobs_R is None or reordered else _with_tokens(found, evidence)


def _with_tokens(found: Measures, evidence: Evidence) -> Measures:
    """Add what log-probs tell about the tokens that the engine sampled."""
    engine_R, native, replayed = evidence.engine_logprobs_R, evidence.native, evidence.replayed
    assert engine_R is not None, "asked before"
    nearest = _nearest(evidence.rescored, engine_R)
    zeros = _zeros(evidence, engine_R, nearest)
    found = replace(
        found, without=_tokens(native, engine_R), with_replay=_tokens(replayed, engine_R), rescored=nearest, zeros=zeros
    )
    native_R, replayed_R = (None if each is None else each.logprobs_R for each in (native, replayed))
    units_R = _units(evidence)
    if native_R is not None and replayed_R is not None:
        split = split_k3(native_R, replayed_R, engine_R) if found.without is not None else None
        found = replace(found, rise=_rise(native_R, replayed_R, engine_R, units_R), split=split)
    # routes of the engine, where they were replayed, leave the least that is not about tokens
    trainer_R = native_R if replayed_R is None else replayed_R
    if trainer_R is None:
        return found
    # at another temperature rare tokens, of which hardly one is drawn, carry the mean
    as_read_R = trainer_R if nearest is None else nearest[0].logprobs_R
    found = replace(found, ratio=_ratio(as_read_R, engine_R, zeros, units_R))
    if zeros:  # sequences of zeros fit nowhere, and set the others apart
        return found
    order = None if evidence.response_lengths_S is None else _order(trainer_R, engine_R, evidence.response_lengths_S)
    return replace(found, shift=_shift(trainer_R, engine_R), order=order)


def _zeros(
    evidence: Evidence, engine_R: NDArray[Any], nearest: tuple[Rescored, TokenMismatch] | None
) -> tuple[Zeros, ...]:
    """Find zeros of the engine, beside the nearest reading of the trainer, and those of each pass of the trainer."""
    passes = {"the trainer": evidence.native, "the trainer, under replay,": evidence.replayed}
    own = {name: each.logprobs_R for name, each in passes.items() if each is not None and each.logprobs_R is not None}
    if not own:
        return ()
    # a temperature near 0 has many zeros, which the trainer does not deny once its own log-probs are taken so
    trainer_R = list(own.values())[-1] if nearest is None else nearest[0].logprobs_R
    lengths_S = evidence.response_lengths_S
    if lengths_S is not None and lengths_S.sum() != len(engine_R):
        lengths_S = None
    found = [denied_zeros("the engine", "the trainer", engine_R, trainer_R, lengths_S)]
    found += [denied_zeros(name, "the engine", logprobs_R, engine_R, lengths_S) for name, logprobs_R in own.items()]
    return tuple(each for each in found if each is not None)


def _units(evidence: Evidence) -> NDArray[np.int64] | None:
    """Number the prompt of each response token, or its sequence where no text is known; None where that is open.

    Tokens behind one prompt are no independent draws: what differs in its rows is in all samples of it.
    """
    engine, lengths_S, prompts_S = evidence.engine, evidence.response_lengths_S, evidence.prompt_lengths_S
    if lengths_S is None or evidence.engine_logprobs_R is None or lengths_S.sum() != len(evidence.engine_logprobs_R):
        return None
    units = np.arange(len(lengths_S))
    if engine is not None and prompts_S is not None:
        if not len(prompts_S) == len(lengths_S) == len(engine):
            raise InputError(
                f"{len(prompts_S)} prompt lengths and {len(lengths_S)} response lengths are given of the "
                f"{len(engine)} sequences of the engine's trace; give one of each per sequence"
            )
        spans = zip(engine.offsets[:-1], prompts_S, strict=True)
        prompts = [engine.token_ids_N[first : first + size].tobytes() for first, size in spans]
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        # of one prompt alone there is no error to tell, and that of its samples is nearest to it
        if len(numbers) > 1:
            units = np.array([numbers[prompt] for prompt in prompts], np.int64)
    return np.repeat(units, lengths_S)


def _ratio(
    trainer_R: NDArray[Any], engine_R: NDArray[Any], zeros: tuple[Zeros, ...], units_R: NDArray[np.int64] | None
) -> tuple[float, float] | None:
    """Give the trainer's over the engine's probability, mean and standard error, over tokens that tell."""
    # nobody can tell whether a probability of 1 was filled in, or one token was left to draw from
    kept_R = ~np.any([np.asarray(engine_R) == 0, *(each.zero_R for each in zeros)], axis=0)
    log_r = (np.asarray(trainer_R, np.float64) - engine_R)[kept_R]
    return _mean(np.exp, log_r, units_R=None if units_R is None else units_R[kept_R]) if len(log_r) > 1 else None


def _rise(
    native_R: NDArray[Any], replayed_R: NDArray[Any], engine_R: NDArray[Any], units_R: NDArray[np.int64] | None
) -> tuple[float, float] | None:
    """Give by how much replay raises a token's part of k3, mean and standard error."""
    if len(engine_R) < 2:
        return None
    log_r = [np.asarray(each, np.float64) - engine_R for each in (native_R, replayed_R)]
    return _mean(
        lambda without, replay: np.expm1(replay) - replay - (np.expm1(without) - without), *log_r, units_R=units_R
    )


def _mean(
    term: Callable[..., NDArray[np.float64]], *log_r: NDArray[np.float64], units_R: NDArray[np.int64] | None
) -> tuple[float, float]:
    """Return the mean of a term of log-ratios and its standard error: that of tokens, or of units if it is larger."""
    with np.errstate(over="ignore", invalid="ignore"):  # a ratio that float64 does not hold makes no figure
        values = term(*log_r)
        error = float(values.std(ddof=1) / len(values) ** 0.5)
        if units_R is not None:
            error = float(np.fmax(error, standard_error(np.bincount(units_R, values), np.bincount(units_R))))
        return float(values.mean()), error


def standard_error(sums_S: ArrayLike, counts_S: ArrayLike) -> float:
    """Return the standard error of `sum(sums_S) / sum(counts_S)`, a mean over tokens; NaN below two such sequences.

    It is too small for k3 of few sequences, which is skewed, and says little about what hardly a sequence has, such as
    F(2) of a good engine.
    """
    sums, counts = np.asarray(sums_S, np.float64), np.asarray(counts_S, np.float64)
    units, total = int((counts > 0).sum()), counts.sum()
    if units < 2:
        return math.nan
    # the delta method with sequences as units: tokens of one sequence depend on each other
    with np.errstate(over="ignore", invalid="ignore"):
        off_S = sums - sums.sum() / total * counts
        error = float(np.sqrt(units / (units - 1) * (off_S**2).sum()) / total)
    return error if math.isfinite(error) else math.nan


def _shift(trainer_R: NDArray[Any], engine_R: NDArray[Any]) -> tuple[int, float, float] | None:
    """Look for log-probs that are moved by a token."""
    if len(engine_R) < FEWEST:
        return None
    own_R, size = np.asarray(trainer_R, np.float64), len(engine_R)
    # medians, since packed tokens that are moved compare one token of each sequence with one of another
    apart = {
        n: float(np.median(np.abs(engine_R[max(n, 0) : size + n] - own_R[max(-n, 0) : size - n]))) for n in (0, 1, -1)
    }
    best = min(apart, key=lambda n: apart[n])
    return (best, apart[best], apart[0]) if apart[best] * EXPLAINS < apart[0] else None


def _order(
    trainer_R: NDArray[Any], engine_R: NDArray[Any], lengths_S: NDArray[np.integer]
) -> tuple[list[int], float, float] | None:
    """Look for log-probs of other sequences, where sequences are too long to fit each other by chance."""
    own_S, engine_S = (np.split(np.asarray(each_R), np.cumsum(lengths_S)[:-1]) for each_R in (trainer_R, engine_R))
    before = float(np.abs(engine_R - trainer_R).mean()) if len(engine_R) else 0.0
    if not 1 < len(own_S) <= MAX_PERMUTED or len(engine_R) < SHORTEST * len(own_S) or before < APART:
        return None
    near = before / EXPLAINS
    # rows of a padded batch in another order are cut by the trainer's lengths; packed sequences keep their own
    for packed in (False, True):
        order: list[int] = []
        apart: list[NDArray[Any]] = []
        for s, cut_R in enumerate(engine_S):
            rest_R = engine_R[sum(map(len, apart)) :] if packed else cut_R
            left = set(range(len(own_S))).difference(order)
            fits = {t: np.abs(rest_R[: len(own_S[t])] - own_S[t][: len(rest_R)]) for t in left}
            # the sequence that explains most, so that long ones count more than short ones; ties stay in place
            order.append(max(left, key=lambda t: ((near - fits[t]).sum(), t == s)))
            apart.append(fits[order[-1]])
        after = float(np.concatenate(apart).mean())
        if order != sorted(order) and after < near:
            return order, after, before
    return None


def _nearest(rescored: tuple[Rescored, ...], engine_R: NDArray[Any]) -> tuple[Rescored, TokenMismatch] | None:
    """Find the reading of the trainer's log-probs that is nearest to the engine's."""
    found = [(one, token_mismatch(one.logprobs_R, engine_R)) for one in rescored]
    return min(found, key=lambda each: each[1].k3) if found else None


def _roots(evidence: Evidence) -> RootMismatch | None:
    """Find roots, where the pass on the engine's routes says what routers would choose there."""
    replayed, native = evidence.replayed, evidence.native
    if evidence.engine is None or replayed is None or replayed.native is None:
        return None
    own = None if native is None else native.executed
    return root_mismatch(evidence.engine, replayed.native, own, deficits_NL=replayed.deficits_NL)


def _choices(own: RoutingTrace | None, engine: RoutingTrace | None) -> StreamDifference | None:
    """Compare choices of indexers, where both have some of the same indexers."""
    a, b = (None if trace is None else trace.streams.get(INDEXER) for trace in (own, engine))
    if a is None or b is None or (a.layers, a.num_rows) != (b.layers, b.num_rows):
        return None
    return stream_difference(a, b)


def _tokens(trainer: TrainerPass | None, other_R: NDArray[Any] | None) -> TokenMismatch | None:
    """Compare log-probs where both are known and a token was sampled."""
    if trainer is None or trainer.logprobs_R is None or other_R is None:
        return None
    found = token_mismatch(trainer.logprobs_R, other_R)
    # a rollout of prompts alone has no k3
    return found if found.count else None
