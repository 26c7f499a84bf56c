"""Steps for a laboratory of nodes: one small model on either executor, and routes of sequences that keep to experts.

Routes are those of the generator's preset R8, which real routes gave, with a source for every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.harness.megatron_plan import RECOMPUTE
from benchmarks.harness.models import Sizes, gpt_model, start_megatron_ranks
from benchmarks.harness.spread_bench import HFBench, MegatronBench, SpreadBench
from benchmarks.harness.step_seconds import recomputing_model
from foreroute.plan.capabilities import Executor, FetchPath
from foreroute.simulate.workload import WORKLOADS
from foreroute.trace import RoutingSpec, RoutingTrace

SIZES = Sizes(hidden=256, heads=4, kv_heads=2, experts=32, top_k=4, expert_width=64)
"""The weights of an expert are as many bytes as 192 rows."""
TOKENS, MICRO_STEPS = 128, 2
"""Of a sequence; micro-steps of a step."""


class Nodes(NamedTuple):
    """A laboratory and what runs there. `bytes_per_s` is of a node's link, which its ranks share."""

    num_nodes: int
    ranks_per_node: int
    bytes_per_s: float
    executor: Executor = "hf"

    @property
    def num_ranks(self) -> int:
        """G."""
        return self.num_nodes * self.ranks_per_node

    @property
    def paths(self) -> FetchPath:
        """Weights of a node's ranks go through its memory."""
        return "host" if self.executor == "hf" and self.ranks_per_node > 1 else "direct"


@dataclass(frozen=True)
class SpreadModel:
    """A model that all ranks of a laboratory share, and what benches of it are."""

    nodes: Nodes
    model: Any
    routed: Any
    bench: type[SpreadBench]

    @classmethod
    def over(cls, nodes: Nodes) -> SpreadModel:
        """Build one, with the same weights each time. A collective call."""
        if nodes.executor == "hf":
            routed: Any = recomputing_model(SIZES, nodes.paths)
            return cls(nodes, routed.model, routed, HFBench)
        start_megatron_ranks(nodes.num_ranks)
        from foreroute.adapters import megatron

        model = gpt_model(SIZES, {"expert_model_parallel_size": nodes.num_ranks, **RECOMPUTE["full"]}, TOKENS)
        return cls(nodes, model, megatron.attach(model), MegatronBench)

    def second_step(self, *, seed: int, sequences: int, at_home: bool = False) -> SpreadBench:
        """Draw the second step of a run: the first is what methods know that plan from the step before."""
        drawn = _drawn(self.routed.spec, self.nodes, seed=seed, sequences=sequences, at_home=at_home)
        return self.bench.of(self.model, self.routed, *drawn)

    def close(self) -> None:
        """Give back what ranks share."""
        self.routed.close()


def drawn_counts(nodes: Nodes, *, seed: int, step: int, sequences: int, at_home: bool = False) -> NDArray[np.int32]:
    """Draw counts of every sequence of a step, int32 [M, L, S, E], rank by rank; all of one length.

    With `at_home` experts of a sequence's own rank are those that it likes best, so that less crosses.
    """
    load = replace(
        WORKLOADS["R8"],
        num_ranks=nodes.num_ranks * sequences,
        num_experts=SIZES.experts,
        top_k=SIZES.top_k,
        num_micro_steps=MICRO_STEPS,
        num_layers=SIZES.layers,
        sequences_per_rank=(1, 1),
        mean_length=1000 * TOKENS,
        longest=TOKENS,
    )
    counts = load.draw(seed=seed, step=step).counts()
    if at_home:
        # popularity stays as drawn; only which rank owns the popular experts changes
        counts = np.sort(counts, axis=-1)[..., ::-1].copy()
        for source in range(counts.shape[2]):
            first = source // sequences * SIZES.experts // nodes.num_ranks
            counts[:, :, source] = np.roll(counts[:, :, source], first, axis=-1)
    return counts


def _drawn(
    spec: RoutingSpec, nodes: Nodes, *, seed: int, sequences: int, at_home: bool
) -> tuple[list[torch.Tensor], list[RoutingTrace]]:
    """Draw the micro-batches of this rank."""
    rank = dist.get_rank()
    counts_MLSE = drawn_counts(nodes, seed=seed, step=1, sequences=sequences, at_home=at_home)
    mine = counts_MLSE[:, :, rank * sequences : (rank + 1) * sequences]
    rng = np.random.default_rng([seed, rank])
    batches = [torch.from_numpy(rng.integers(0, SIZES.vocabulary, (sequences, TOKENS))) for _ in mine]
    return batches, [_routed(spec, batch, each, rng) for batch, each in zip(batches, mine, strict=True)]


def _routed(
    spec: RoutingSpec, batch: torch.Tensor, counts_LSE: NDArray[np.integer], rng: np.random.Generator
) -> RoutingTrace:
    """Make routes of these counts: an expert's tokens are neighbours, in an order drawn for each layer."""
    ids = np.empty((len(batch), TOKENS, spec.num_layers, spec.top_k), np.int64)
    for layer, sequence in np.ndindex(*counts_LSE.shape[:2]):
        expert_A = np.repeat(np.arange(spec.num_experts), counts_LSE[layer, sequence])
        # an expert has no more assignments than there are tokens, so that no token gets it twice
        ids[sequence, rng.permutation(TOKENS), layer] = expert_A.reshape(spec.top_k, TOKENS).T
    return RoutingTrace.from_sequences(spec, list(batch.numpy()), list(ids))
