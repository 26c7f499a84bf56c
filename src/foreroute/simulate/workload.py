"""A seeded generator of the expert loads of RL micro-steps, for tests and benchmarks of planners.

What makes micro-steps uneven is not that tokens are drawn at random: thousands of them average that away. It is that a
micro-step holds few sequences, and that a sequence keeps to its experts. So shares are drawn level by level: a layer's
(Dirichlet), which drift from step to step; a micro-step's around the layer's (Dirichlet); a prompt's, shared by its
group of responses, as `prompt_draws` experts drawn from the micro-step's; a response's as `response_draws` of those,
with weights. Lengths are lognormal. Counts are then the shares in whole numbers, with K distinct experts per token.

R8 is calibrated to routes that a small model really made, dealt to micro-steps at random (experiments/results.md, part
H); the simulator draws it by default. The presets G and E are calibrated to statistics of one other generator (static
imbalance, fluctuation, correlations), which was shaped after published figures: beside those routes their micro-steps
swing 2.9 to 4.7 times as much and their steps change 3.6 to 6.2 times as much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import ConfigError
from foreroute.kernels import FLOAT, INT, ArrayOf, StructOf, compiled
from foreroute.plan.counts import MOST_ASSIGNMENTS

GROUP = 8
"""Responses per prompt: as many as in the runs of the R3 paper (arXiv 2510.11370)."""
LENGTH_SIGMA = 0.7
"""Standard deviation of the logarithm of lengths. Chosen by hand, as is `SHORTEST`."""
SHORTEST = 32
"""Tokens; shorter draws are taken for this."""
DRIFT = 0.03
"""Standard deviation of the change of a log share from one step to the next. Chosen by hand."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape and the unevenness of an RL step."""

    num_ranks: int  # G, sources of tokens
    num_experts: int = 128  # E
    top_k: int = 8  # K
    num_micro_steps: int = 32  # M
    num_layers: int = 48  # L
    sequences_per_rank: tuple[int, int] = (4, 8)  # fewest and most sequences of a rank in a micro-step, drawn evenly
    mean_length: int = 1900  # of a sequence in tokens, before clipping
    longest: int = 8192  # longer sequences are clipped
    # deal the sequences of a micro-step longest first, each to the rank with the fewest tokens, instead of at random
    even_sources: bool = False
    layer_evenness: float  # Dirichlet concentration of a layer's shares; lower is more uneven
    micro_step_evenness: float  # Dirichlet concentration, in all experts together, of a micro-step around its layer
    prompt_draws: int  # experts drawn for a prompt; fewer make prompts differ more
    response_draws: int  # experts drawn for a response from those of its prompt
    # part of every sequence's assignments that follows the micro-step's shares, above 0 and below 1
    common: float = 0.1

    def __post_init__(self) -> None:
        most = self.sequences_per_rank[1]
        heaviest = most * self.longest * self.num_ranks * self.top_k
        if heaviest > MOST_ASSIGNMENTS:
            raise ConfigError(
                f"{self.num_ranks} ranks with {most} sequences of {self.longest} tokens and top-{self.top_k} may make "
                f"{heaviest} assignments in a cell; expected {MOST_ASSIGNMENTS} at most. Take fewer tokens or ranks"
            )
        # whole tokens of more picks than there are experts are drawn for ever
        draws = self.prompt_draws, self.response_draws
        if not 1 <= self.top_k <= self.num_experts or min(draws) < 1 or not 0 < self.common < 1:
            raise ConfigError(
                f"top-{self.top_k} of {self.num_experts} experts, draws of {draws} and a common part of {self.common} "
                "cannot be drawn; expected 1 to all experts, 1 draw or more, and a part above 0 and below 1"
            )

    def of_tokens(self, tokens: int) -> Workload:
        """The same with about this many tokens of a rank, 512 or more, to 5 %: four or five sequences, dealt evenly."""
        length, longest = tokens * 10 // 42, max(tokens, 2048)
        return replace(self, even_sources=True, sequences_per_rank=(4, 5), mean_length=length, longest=longest)

    def draw(self, *, seed: int, step: int = 0) -> DrawnStep:
        """The step number `step` of the run `seed`. The same numbers give the same step (for one version of numpy)."""
        return DrawnStep(self, seed, step)


def _preset(num_ranks: int, evenness: tuple[float, float], draws: tuple[int, int], num_experts: int = 128) -> Workload:
    return Workload(
        num_ranks=num_ranks,
        num_experts=num_experts,
        layer_evenness=evenness[0],
        micro_step_evenness=evenness[1],
        prompt_draws=draws[0],
        response_draws=draws[1],
    )


WORKLOADS = {
    "G8": _preset(8, (2.7, 240.0), (124, 47)),
    "G16": _preset(16, (1.27, 170.0), (100, 35)),
    "G32": _preset(32, (1.16, 167.0), (120, 30)),
    "G64": _preset(64, (0.71, 140.0), (95, 130)),
    "E256": _preset(64, (0.65, 312.0), (95, 296), num_experts=256),
    "R8": _preset(8, (2.0, 20_000.0), (1000, 150), num_experts=64),
}
"""Named workloads: K = 8, 48 layers, 32 micro-steps. G8 to G64: 128 experts, 4 to 8 sequences (about 11,400 tokens) per
rank and micro-step; E256: 256 experts on 64 ranks; R8: as G8, with 64 experts that are as uneven as those of a small
model which was trained on text of several kinds."""


class DrawnStep:
    """One drawn step. S sequences in all, sorted by micro-step; every cell is drawn from a stream of its own.

    Attributes:
        workload: what was drawn from.
        micro_step_S: int32 [S], ascending.
        rank_S: int32 [S], the source rank.
        prompt_S: int32 [S], ascending; responses of one prompt share a number.
        rows_S: int32 [S], routed tokens.
    """

    def __init__(self, workload: Workload, seed: int, step: int) -> None:
        """Draw the sequences; shares and counts are drawn when asked for."""
        self.workload = workload
        self._seed, self._step = seed, step
        rng = np.random.default_rng([seed, step, 0])
        fewest, most = workload.sequences_per_rank
        counts_MG = rng.integers(fewest, most + 1, (workload.num_micro_steps, workload.num_ranks))
        lengths = [_lengths(workload, count, rng) for count in counts_MG.sum(axis=1)]
        prompts = [np.arange(len(n)) // GROUP for n in lengths]
        # prompts are numbered over the whole step, and never shared by micro-steps
        firsts = np.cumsum([0] + [int(p[-1]) + 1 for p in prompts])
        if workload.even_sources:
            ranks = [_deal_longest_first(n, workload.num_ranks) for n in lengths]
        else:
            ranks = [rng.permutation(np.repeat(np.arange(workload.num_ranks), counts_G)) for counts_G in counts_MG]
        self.micro_step_S = np.repeat(np.arange(len(lengths)), [len(n) for n in lengths]).astype(np.int32)
        self.rows_S = np.concatenate(lengths).astype(np.int32)
        self.prompt_S = np.concatenate([p + f for p, f in zip(prompts, firsts[:-1], strict=True)]).astype(np.int32)
        self.rank_S = np.concatenate(ranks).astype(np.int32)

    @cached_property
    def _first_M(self) -> NDArray[np.int64]:
        return np.searchsorted(self.micro_step_S, np.arange(self.workload.num_micro_steps + 1)).astype(np.int64)

    @cached_property
    def _share_MLE(self) -> NDArray[np.float64]:
        load = self.workload
        shape = (load.num_layers, load.num_experts)
        # Dirichlet shares are gamma variates by their sum. Small concentrations underflow to 0, which what is added
        # prevents: an expert of share 0 could never drift back.
        base_LE = np.random.default_rng([self._seed, 0, 1]).standard_gamma(load.layer_evenness, shape) + 1e-9
        for step in range(1, self._step + 1):
            base_LE *= np.exp(DRIFT * np.random.default_rng([self._seed, step, 2]).standard_normal(shape))
        base_LE /= base_LE.sum(axis=1, keepdims=True)
        rng = np.random.default_rng([self._seed, self._step, 3])
        share_MLE: NDArray[np.float64] = (
            rng.standard_gamma(load.micro_step_evenness * base_LE, (load.num_micro_steps, *shape)) + 1e-12
        )
        share_MLE /= share_MLE.sum(axis=2, keepdims=True)
        return share_MLE

    @cached_property
    def _seed_ML(self) -> NDArray[np.uint64]:
        load = self.workload
        rng = np.random.default_rng([self._seed, self._step, 4])
        return rng.integers(0, 2**64, (load.num_micro_steps, load.num_layers), dtype=np.uint64)

    def counts(self) -> NDArray[np.int32]:
        """counts_MLGE: int32 [M, L, G, E], assignments per micro-step, layer, source rank and expert."""
        load = self.workload
        counts = np.zeros((load.num_micro_steps, load.num_layers, load.num_ranks, load.num_experts), np.int32)
        draw_cells(self._seed_ML, self._share_MLE, self._first_M, self.prompt_S, self.rows_S, self.rank_S, load, counts)
        return counts

    def sequence_counts(self, begin: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """Draw the same by sequence: int32 [S, L, E], as `foreroute.plan.sequence_counts` gives them of traces.

        Those of the micro-steps `begin` to `end` - 1 alone, by default of all.
        """
        load, part, first_M = self.workload, slice(begin, end), self._first_M[begin:][: end and end - begin + 1]
        # a cell adds by rank: here each of its sequences has one of its own
        number_S = (np.arange(len(self.rows_S)) - self._first_M[self.micro_step_S]).astype(np.int32)
        shape = (len(first_M) - 1, load.num_layers, int(np.diff(first_M).max()), load.num_experts)
        counts = np.zeros(shape, np.int32)
        draw_cells(
            self._seed_ML[part], self._share_MLE[part], first_M, self.prompt_S, self.rows_S, number_S, load, counts
        )
        drawn = slice(first_M[0], first_M[-1])
        counts_SLE: NDArray[np.int32] = counts[self.micro_step_S[drawn] - begin, :, number_S[drawn]]
        return counts_SLE


def _lengths(load: Workload, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    # The mean of a lognormal is exp(mu + sigma**2 / 2).
    mu = np.log(load.mean_length) - LENGTH_SIGMA**2 / 2
    return np.clip(rng.lognormal(mu, LENGTH_SIGMA, count), SHORTEST, load.longest).astype(np.int64)


def _deal_longest_first(lengths_S: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """The rank of each sequence: longest first, to the rank with the fewest tokens so far."""
    # longest first leaves short ones to even out what is left
    ranks_S, tokens_G = np.empty(len(lengths_S), np.int64), np.zeros(num_ranks, np.int64)
    for s in np.argsort(-lengths_S, kind="stable"):
        ranks_S[s] = np.argmin(tokens_G)
        tokens_G[ranks_S[s]] += lengths_S[s]
    return ranks_S


draw_cells = compiled(
    "draw_cells",
    ArrayOf(np.uint64, 2),
    ArrayOf(np.float64, 3),
    ArrayOf(np.int64, 1),
    ArrayOf(np.int32, 1),
    ArrayOf(np.int32, 1),
    ArrayOf(np.int32, 1),
    StructOf(top_k=INT, prompt_draws=INT, response_draws=INT, common=FLOAT),
    ArrayOf(np.int32, 4, filled=True),
)
"""Add the assignments of every cell. Each is drawn from a stream of its own: alone it is the same as in a step.

Takes seeds, uint64 [M, L]; shares, float64 [M, L, E], that add up to 1; the first sequence of each micro-step, int64
[M + 1]; prompts, rows and ranks, int32 [S], as in `DrawnStep`; the `Workload`; and counts, int32 [M, L, G, E]. What
sequence s adds is `rows_S[s] * top_k` in all, and to no entry more than `rows_S[s]`.
"""
