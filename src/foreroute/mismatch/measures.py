"""Measures of how far trainer and engine are apart, kept as sums and counts so that batches and ranks can be added.

What is compared may be an array or a tensor of any type and library. `packed` and `as_traces` alone turn it into rows.
A margin is the gap between the last expert that is in and the first that is out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_array, as_mask
from foreroute.errors import InputError, SpecMismatchError, shown
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.trace.checks import recorded_rows
from foreroute.trace.container import on_common_layers
from foreroute.trace.operations import overlap

THRESHOLDS = (1.5, 2.0)
"""The tau of F(tau), share of tokens whose probabilities differ more than tau-fold; arXiv 2510.11370 reports tau 2."""
MOST_LOGPROB = 1e-3
"""A log-probability is at most 0. In float32, a logit and the logarithm of the sum of all are rounded apart, by up to
1e-5 for logits near 100. The rest is room for coarser engines."""
MOST_SUM = float(np.finfo(np.float64).max)
"""The largest number. One token's r is above it from 709 nats on: that is a mismatch, and no reason to end a run."""
LOG10_EDGES = np.linspace(-8.0, 1.0, 37)
"""Bin edges of log10(margin), a quarter of a decade wide. Outliers fall into the outermost bins."""


def token_mismatch(
    train_logprobs: ArrayLike, infer_logprobs: ArrayLike, *, mask: ArrayLike | None = None
) -> TokenMismatch:
    """Compare log-probabilities of the same R sampled response tokens, computed in float64.

    Args:
        train_logprobs: of the trainer, numbers [R], or of any shape with a mask of that shape.
        infer_logprobs: of the engine, of the same shape.
        mask: bools, or 0 and 1: which entries are sampled response tokens. The others are not looked at.

    Raises:
        InputError: when the shapes differ, or a value is not finite or above `MOST_LOGPROB`.
    """
    train = packed(train_logprobs, mask, name="log-probs of the trainer")
    infer = packed(infer_logprobs, mask, name="log-probs of the engine")
    if train.shape != infer.shape:
        raise InputError(
            f"log-probs of the trainer have shape {train.shape}, of the engine {infer.shape}; expected the same tokens"
        )
    for side, logprobs in (("the trainer", train), ("the engine", infer)):
        impossible = ~(np.isfinite(logprobs) & (logprobs <= MOST_LOGPROB))
        if impossible.any():
            raise InputError(
                f"log-probs of {side} hold {logprobs[impossible][0]}; expected finite numbers up to 0, the natural "
                f"logarithms of the probabilities of sampled tokens. {int(impossible.sum())} of {len(logprobs)} have "
                f"none, the first at {int(impossible.argmax())} of those that count; leave them out by mask="
            )
    log_r = train - infer
    with np.errstate(over="ignore"):
        k3_sum = (np.expm1(log_r) - log_r).sum()
    return TokenMismatch(
        count=len(log_r),
        k3_sum=min(float(k3_sum), MOST_SUM),
        above=tuple(int((np.abs(log_r) > math.log(tau)).sum()) for tau in THRESHOLDS),
        max_abs_log=float(np.abs(log_r).max(initial=0.0)),
    )


def routing_mismatch(
    rollout: RoutingTrace | ArrayLike, trainer: RoutingTrace | ArrayLike, *, mask: ArrayLike | None = None
) -> RoutingMismatch:
    """Compare the routes of the same tokens by two sides.

    Args:
        rollout: of the engine, a trace, or routes [B, T, L, K] with -1 in all of a position that was not recorded.
        trainer: of the trainer, in the same form.
        mask: [B, T], bools, or 0 and 1: which tokens of arrays count.

    Raises:
        SpecMismatchError, BatchMismatchError: when they are of other models or other tokens.
        TraceContentError: when routes cannot be true.
        InputError: when a trace is given beside an array, or with a mask.
    """
    rollout, trainer = as_traces(rollout, trainer, mask)
    shared_RL, _ = overlap(rollout, trainer)
    differs_RL: NDArray[Any] = shared_RL < rollout.spec.picks_L
    num_layers = rollout.spec.num_layers
    per_row = differs_RL.sum(axis=1)
    first = differs_RL.argmax(axis=1)[per_row > 0]
    return RoutingMismatch(
        rows=len(shared_RL),
        picks_L=rollout.spec.picks_L,
        differing_L=differs_RL.sum(axis=0, dtype=np.int64),
        shared_L=shared_RL.sum(axis=0, dtype=np.int64),
        by_differing_layers=np.bincount(per_row, minlength=num_layers + 1),
        first_differing_L=np.bincount(first, minlength=num_layers),
    )


def margin_histogram(margins_NL: ArrayLike, *, mask: ArrayLike | None = None) -> NDArray[np.int64]:
    """Count margins, K-th minus (K+1)-th selection score, into the B bins between `LOG10_EDGES`: int64 [L, B].

    Args:
        margins_NL: numbers [N, L] in the router's own scale, or [..., L] with a mask [...].
        mask: bools, or 0 and 1: which tokens count.

    Raises:
        InputError: when they are no numbers of tokens and layers, or one of a token that counts is NaN.
    """
    margins = packed(margins_NL, mask, name="margins", axes=1)
    if unknown := int(np.isnan(margins).sum()):
        raise InputError(
            f"{unknown} of {margins.size} margins are NaN, which no bin counts; leave their tokens out by mask=, or "
            "look for scores of the router that are not finite"
        )
    smallest, largest = 10 ** LOG10_EDGES[0], 10 ** LOG10_EDGES[-1]
    logs = np.log10(np.clip(margins, smallest, largest * (1 - 1e-9)))
    counts = [np.histogram(logs[:, layer], bins=LOG10_EDGES)[0] for layer in range(logs.shape[1])]
    return np.array(counts, np.int64).reshape(logs.shape[1], len(LOG10_EDGES) - 1)


def packed(
    values: ArrayLike,  # numbers [...] of any type, and `axes` more axes
    mask: ArrayLike | None,  # [...], true where a token counts; all of one axis of tokens do by default
    *,
    name: str,  # what they are, in the plural, for the message
    axes: int = 0,  # how many axes follow those of tokens
) -> NDArray[np.float64]:
    """Return the numbers of the tokens that count, one after the other: float64 [R, ...]."""
    array = as_array(values, name=name, error=InputError)
    tokens = array.shape[: max(array.ndim - axes, 0)]
    kept = np.ones(tokens, np.bool_) if mask is None else as_mask(mask, name="mask", error=InputError)
    if array.dtype.kind not in "fiu" or kept.shape != tokens or not tokens or (mask is None and len(tokens) != 1):
        given = "without a mask" if mask is None else f"with a mask of {kept.shape}"
        raise InputError(
            f"{name} are {array.dtype} of shape {array.shape}, {given}; expected numbers of one token after the other, "
            "or those of a padded batch with mask=, 0 or 1 for each token"
        )
    return array[kept].astype(np.float64)


def as_traces(
    a: RoutingTrace | ArrayLike,  # integers [B, T, L, K] of any width, -1 in all of a position that was not recorded
    b: RoutingTrace | ArrayLike,  # routes in the same form
    mask: ArrayLike | None = None,  # [B, T], true where a token is; everywhere by default
    # the model; by default the highest id is the last expert's, and layers are "routed layer 0" and so on
    spec: RoutingSpec | None = None,
) -> tuple[RoutingTrace, RoutingTrace]:
    """Return the routes of the same tokens by two sides as traces of the same layers."""
    if isinstance(a, RoutingTrace) and isinstance(b, RoutingTrace) and mask is None:
        a, b = on_common_layers([a, b], what="the second trace")
        return a, b
    if isinstance(a, RoutingTrace) or isinstance(b, RoutingTrace):
        raise InputError(
            "a trace is beside an array or a mask; expected two traces, which know their tokens, so leave "
            "attention_mask= or mask= out; or two arrays (trace.to_padded())"
        )
    sides = [as_array(routes, name="the routes") for routes in (a, b)]
    shape = sides[0].shape
    kept = np.ones(shape[:2], np.bool_) if mask is None else as_mask(mask, name="mask")
    if len(shape) != 4 or (sides[1].shape, kept.shape) != (shape, shape[:2]) or 0 in shape[2:]:
        raise InputError(
            f"routes have shapes {shape} and {sides[1].shape}, the mask {kept.shape}; expected "
            "[B, T, layers, picks] of both, and [B, T]"
        )
    if spec is None:
        integers = [ids for ids in sides if ids.dtype.kind in "iu"]
        highest = max([0, *(int(ids[kept & recorded_rows(ids)].max(initial=0)) for ids in integers)])
        spec = RoutingSpec(max(highest + 1, shape[3]), shape[3], tuple(map(_NthLayer, range(shape[2]))))
    no_tokens = np.zeros(shape[:2], np.int32)
    of_a, of_b = (RoutingTrace.from_padded(spec, no_tokens, ids, kept) for ids in sides)
    return of_a, of_b


class _NthLayer(RoutedLayer):
    """A layer of arrays without a model: dense layers may stand before it, so that its number in the model is open."""

    @property
    def noun(self) -> str:
        """See `RoutedLayer`."""
        return "routed layer"


@dataclass(frozen=True)
class TokenMismatch:
    """Sums over response tokens of r = pi_train / pi_infer, the ratio at the sampled token.

    Attributes:
        count: number of tokens.
        k3_sum: sum of r - 1 - log r; `MOST_SUM` where float64 does not hold it.
        above: for each threshold tau of `THRESHOLDS`, how many tokens have max(r, 1 / r) > tau.
        max_abs_log: largest |log r|, in nats.
    """

    count: int
    k3_sum: float
    above: tuple[int, ...]
    max_abs_log: float

    def __repr__(self) -> str:
        counted = zip(THRESHOLDS, self.above, strict=False)  # a record may count others
        shares = "".join(f", F({tau:g}) {above / (self.count or math.nan):.2%}" for tau, above in counted)
        return f"TokenMismatch(k3 {self.k3:.3g}{shares}, {self.count} tokens)"

    @property
    def k3(self) -> float:
        """Mean of r - 1 - log r: estimates KL(pi_infer || pi_train) in nats. Source: arXiv 2510.11370, equation 2."""
        return self.k3_sum / self.count if self.count else math.nan

    def f(self, tau: float) -> float:
        """F(tau), the share of tokens with max(r, 1 / r) > tau. Source: arXiv 2510.11370, equation 3.

        Raises:
            InputError: for a tau that is none of `THRESHOLDS`, for which nothing was counted.
        """
        if tau not in THRESHOLDS:
            raise InputError(f"F({tau}) was not counted; expected tau to be one of {', '.join(map(str, THRESHOLDS))}")
        return self.above[THRESHOLDS.index(tau)] / self.count if self.count else math.nan

    def __add__(self, other: TokenMismatch) -> TokenMismatch:
        """Return the mismatch over the tokens of both; sums over other thresholds raise `InputError`."""
        if len(self.above) != len(other.above):
            raise InputError(
                f"one mismatch counts {len(self.above)} thresholds, the other {len(other.above)}; expected those of "
                f"one foreroute, {', '.join(map(str, THRESHOLDS))}"
            )
        return TokenMismatch(
            self.count + other.count,
            min(self.k3_sum + other.k3_sum, MOST_SUM),
            tuple(a + b for a, b in zip(self.above, other.above, strict=True)),
            max(self.max_abs_log, other.max_abs_log),
        )


@dataclass(frozen=True, eq=False)
class RoutingMismatch:
    """Counts over the rows that both sides routed, prompt included; experts are compared as sets. Shares of none are
    NaN.

    Attributes:
        rows: number of token rows compared.
        picks_L: int64 [L], the K of each layer.
        differing_L: int64 [L], rows whose expert set differs, per layer.
        shared_L: int64 [L], experts picked by both, summed over rows.
        by_differing_layers: int64 [L + 1], rows by their number of differing layers.
        first_differing_L: int64 [L], rows by the first layer that differs.
    """

    rows: int
    picks_L: NDArray[np.int64]
    differing_L: NDArray[np.int64]
    shared_L: NDArray[np.int64]
    by_differing_layers: NDArray[np.int64]
    first_differing_L: NDArray[np.int64]

    def __repr__(self) -> str:
        shares = f"{self.differing_share:.2%} of (token, layer), {self.differing_tokens_share:.2%} of tokens"
        return f"RoutingMismatch({shares}, {self.rows} rows of {len(self.differing_L)} layers)"

    @property
    def differing_share(self) -> float:
        """Share of (token, layer) whose expert sets differ. Source: arXiv 2510.11370, section 3.2, router level."""
        return float(self.differing_L.sum() / (self.rows * len(self.differing_L) or math.nan))

    @property
    def differing_tokens_share(self) -> float:
        """Share of tokens with at least one differing layer. Source: arXiv 2510.11370, section 3.2, token level."""
        return float(self.by_differing_layers[1:].sum() / (self.rows or math.nan))

    @property
    def differing_share_L(self) -> NDArray[np.float64]:
        """float64 [L], share of tokens whose expert set differs, per layer."""
        return np.asarray(self.differing_L / (self.rows or math.nan), np.float64)

    @property
    def overlap_L(self) -> NDArray[np.float64]:
        """float64 [L], mean share of a token's experts that both sides picked, per layer."""
        return np.asarray(self.shared_L / (self.rows * self.picks_L if self.rows else math.nan), np.float64)

    def __add__(self, other: RoutingMismatch) -> RoutingMismatch:
        """Return the mismatch over the rows of both; other layers or picks raise `SpecMismatchError`."""
        if not np.array_equal(self.picks_L, other.picks_L):
            one, two = (
                f"{len(each.picks_L)} layers with picks {shown(each.picks_L.tolist())}" for each in (self, other)
            )
            raise SpecMismatchError(f"one mismatch is of {one}, the other of {two}; add those of one model")
        # sums and counts add up over batches and ranks, where means would not
        added = {name: value + vars(other)[name] for name, value in vars(self).items() if name != "picks_L"}
        return replace(self, **added)
