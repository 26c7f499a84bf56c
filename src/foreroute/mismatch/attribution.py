"""Causes of a mismatch: routing or the rest of k3, and the flips that began it.

On the engine's routes all that comes before a router is the engine's, but for arithmetic. A decision that the trainer
would still take otherwise there is a *root*; every other flip of its own pass is a *consequence* of roots. The deficit
of a root, by how much the trainer's last pick beats the engine's worst one, tells a near-tie from a defect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import InputError
from foreroute.mismatch.measures import MOST_SUM, packed, token_mismatch
from foreroute.trace import RoutingTrace
from foreroute.trace.operations import overlap

FEWEST_ROOTS = 16
"""Roots from which a batch says what its deficits are like, and from which the rate of a layer is looked at."""
CHANCE = 1e-3
"""Batches without a defect in which a deficit is called far. Roundings give deficits a lighter tail than the
exponential one that is assumed: in `tests/doctor/test_roots.py` none is."""
STEEP = 5.0
"""Times the median of the other layers' rates of roots from which a layer is named."""


@dataclass(frozen=True)
class K3Split:
    """k3 of a pass on the trainer's own routes, in two parts that add up to it: sums over `count` tokens, in nats.

    A token with log r = g has a part of r - 1 - log r in proportion to that of g: the routing part is log pi on the
    trainer's routes less that on the engine's, the rest what the pass on the engine's routes leaves.
    """

    count: int
    routing_sum: float
    rest_sum: float

    @property
    def routing(self) -> float:
        """Part of k3 that replay takes away, in nats per token; below 0 where replay adds."""
        return self.routing_sum / self.count if self.count else math.nan

    @property
    def rest(self) -> float:
        """Part of k3 that replay leaves, in nats per token: gate weights, which no engine returns, and arithmetic."""
        return self.rest_sum / self.count if self.count else math.nan

    @property
    def routing_share(self) -> float:
        """The part of k3 that is routing's; NaN where k3 is 0."""
        whole = self.routing_sum + self.rest_sum
        return self.routing_sum / whole if whole else math.nan

    def __add__(self, other: K3Split) -> K3Split:
        """Return the split over the tokens of both."""
        return K3Split(self.count + other.count, self.routing_sum + other.routing_sum, self.rest_sum + other.rest_sum)


def split_k3(native_logprobs_R: ArrayLike, replayed_logprobs_R: ArrayLike, engine_logprobs_R: ArrayLike) -> K3Split:
    """Split k3 of a trainer on its own routes into routing and the rest, by its log-probs on the engine's routes.

    Raises:
        InputError: as `token_mismatch`.
    """
    without = token_mismatch(native_logprobs_R, engine_logprobs_R)
    token_mismatch(replayed_logprobs_R, engine_logprobs_R)  # which refuses what cannot be
    native_R, replayed_R, engine_R = (
        packed(each, None, name="log-probs") for each in (native_logprobs_R, replayed_logprobs_R, engine_logprobs_R)
    )
    weights_R = k3_weights(native_R - engine_R)
    with np.errstate(over="ignore", invalid="ignore"):
        routing = float((weights_R * (native_R - replayed_R)).sum())
    if not math.isfinite(routing):
        routing = math.copysign(MOST_SUM, routing) if math.isinf(routing) else 0.0
    return K3Split(without.count, routing, min(without.k3_sum - routing, MOST_SUM))


def k3_weights(log_r_R: NDArray[np.float64]) -> NDArray[np.float64]:
    """Give (r - 1 - log r) / log r of each token, what a nat of its log-ratio is of k3: about half of log r."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return np.where(np.abs(log_r_R) < 1e-6, log_r_R / 2, (np.expm1(log_r_R) - log_r_R) / log_r_R)


class Root(NamedTuple):
    """One root, by its place."""

    sequence: int
    position: int  # in the sequence
    layer: int  # its place on the layer axis
    engine: list[int]  # experts that the engine alone picked
    trainer: list[int]  # experts that the trainer alone would pick
    deficit: float


@dataclass(frozen=True, eq=False)
class RootMismatch:
    """Roots over the rows that both sides routed, prompt included.

    Attributes:
        rows: number of token rows compared.
        roots_L: int64 [L], decisions that are roots.
        distinct_L: int64 [L], the same where those behind the same text are one: samples of one prompt share its rows,
            and a near-tie there is a root in each of them. In arrays, without text, all are distinct.
        consequences_L: int64 [L], those that differ in the trainer's own pass and are no root; None where that pass is
            not known.
        median: of the deficits of distinct roots that are no ties; NaN where there is none.
        threshold: deficit from which a root stands far above the others; infinite below `FEWEST_ROOTS` of these.
        worst: distinct roots by their deficit, the largest first: all that stand far above the others, and one at
            least. Empty where deficits are not known.
    """

    rows: int
    roots_L: NDArray[np.int64]
    distinct_L: NDArray[np.int64]
    consequences_L: NDArray[np.int64] | None
    median: float
    threshold: float
    worst: tuple[Root, ...]

    @property
    def share(self) -> float:
        """Share of (token, layer) that are roots."""
        return float(self.roots_L.sum() / (self.rows * len(self.roots_L) or math.nan))

    @property
    def share_L(self) -> NDArray[np.float64]:
        """float64 [L], share of tokens that have a root, per layer."""
        return np.asarray(self.roots_L / (self.rows or math.nan), np.float64)

    @property
    def consequences_share(self) -> float:
        """Share of (token, layer) that differ in the trainer's own pass as a consequence of roots."""
        if self.consequences_L is None:
            return math.nan
        return float(self.consequences_L.sum() / (self.rows * len(self.roots_L) or math.nan))

    @property
    def far(self) -> tuple[Root, ...]:
        """Roots whose deficit stands far above those of the others: no near-ties."""
        return tuple(root for root in self.worst if root.deficit > self.threshold)

    @property
    def steep(self) -> list[tuple[int, float]]:
        """Layers with distinct roots at `STEEP` times the median rate of the others or more, and how many times."""
        found = []
        for layer, count in enumerate(self.distinct_L.tolist()):
            others = np.delete(self.distinct_L, layer)
            # one root, as a median of 0 has no multiples
            median = max(float(np.median(others)), 1.0) if len(others) > 1 else math.inf
            if count >= max(FEWEST_ROOTS, STEEP * median):
                found.append((layer, count / median))
        return sorted(found, key=lambda each: -each[1])


def root_mismatch(
    engine: RoutingTrace,
    replayed: RoutingTrace,
    trainer: RoutingTrace | None = None,
    *,
    deficits_NL: ArrayLike | None = None,
) -> RootMismatch:
    """Find the roots of a batch.

    Args:
        engine: its routes.
        replayed: what the trainer's routers would choose by themselves in a pass on these routes, as
            `record(native=True)` keeps it.
        trainer: the routes of the trainer's own pass, which tell consequences.
        deficits_NL: numbers, of every row of `replayed`, as `deficits_NL()` of that recording.

    Raises:
        SpecMismatchError, BatchMismatchError: when traces are of other models or tokens.
        InputError: when deficits are of other rows.
    """
    shared_RL, rows = overlap(engine, replayed)
    differs_RL = shared_RL < engine.spec.picks_L
    consequences = None
    if trainer is not None:
        shared_RL, of_flips = overlap(engine, trainer)
        flips_RL = shared_RL < engine.spec.picks_L
        both = np.isin(of_flips, rows), np.isin(rows, of_flips)
        consequences = (flips_RL[both[0]] & ~differs_RL[both[1]]).sum(axis=0, dtype=np.int64)
    median, threshold = math.nan, math.inf
    worst: tuple[Root, ...] = ()
    row_of, layer_of = np.nonzero(differs_RL)
    row_of = rows[row_of]
    if deficits_NL is not None:
        deficits = packed(deficits_NL, None, name="deficits", axes=1)
        if deficits.shape != replayed.expert_ids_NLK.shape[:2]:
            raise InputError(f"deficits are {deficits.shape}; expected {replayed.expert_ids_NLK.shape[:2]}, [N, L]")
        # of copies the first counts, which is the one that is least like a near-tie
        order = np.argsort(-deficits[row_of, layer_of], kind="stable")
        row_of, layer_of = row_of[order], layer_of[order]
    kept = np.sort(np.unique(_first_rows(engine)[row_of] * differs_RL.shape[1] + layer_of, return_index=True)[1])
    row_of, layer_of = row_of[kept], layer_of[kept]
    distinct_L = np.bincount(layer_of, minlength=differs_RL.shape[1])
    if deficits_NL is not None:
        # a router whose scores are NaN says nothing of near-ties
        known = ~np.isnan(deficits[row_of, layer_of])
        row_of, layer_of = row_of[known], layer_of[known]
        found = deficits[row_of, layer_of]
        # exact ties, which bfloat16 has many of, say nothing of how large the deficit of a near-tie is
        apart = found[found > 0]
        if len(apart):
            median = float(np.median(apart))
        if len(apart) >= FEWEST_ROOTS:
            # the largest of so many where half exceed the median, and half of these twice it, and so on
            threshold = median * math.log2(len(apart) / CHANCE)
        shown = zip(row_of.tolist(), layer_of.tolist(), found.tolist(), strict=True)
        worst = tuple(_root(engine, replayed, *each) for each in islice(shown, max(1, int((found > threshold).sum()))))
    roots_L = differs_RL.sum(axis=0, dtype=np.int64)
    return RootMismatch(len(rows), roots_L, distinct_L, consequences, median, threshold, worst)


def _first_rows(trace: RoutingTrace) -> NDArray[np.int64]:
    """Give for each row that of one sequence for all with the same text up to there, int64 [N]."""
    first_N, tokens_N = np.arange(trace.num_rows), trace.token_ids_N.astype(">i4")
    if not tokens_N.any():  # of routes in arrays no text is known
        return first_N
    # in the order of their texts, each shares most with the one before
    spans = [slice(*each) for each in pairwise(trace.offsets.tolist())]
    for before, own in pairwise(sorted(spans, key=lambda span: tokens_N[span].tobytes())):
        size = min(before.stop - before.start, own.stop - own.start)
        differs = tokens_N[before][:size] != tokens_N[own][:size]
        shared = int(differs.argmax()) if differs.any() else size
        first_N[own.start : own.start + shared] = first_N[before.start : before.start + shared]
    return first_N


def _root(engine: RoutingTrace, replayed: RoutingTrace, row: int, layer: int, deficit: float) -> Root:
    sequence = int(np.searchsorted(engine.offsets, row, side="right")) - 1
    of_engine, own = (set(trace.expert_ids_NLK[row, layer].tolist()) for trace in (engine, replayed))
    position = row - int(engine.offsets[sequence])
    return Root(sequence, position, layer, sorted(of_engine - own), sorted(own - of_engine), deficit)
