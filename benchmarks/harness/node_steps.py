"""Steps for a laboratory of nodes: one small model on either executor, and routes of sequences that keep to experts.

Routes are those of the generator's preset R8, which real routes gave, with a source for every sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.execution_bench import Bench
from benchmarks.harness.megatron_plan import forward_step, gpt_model, run_schedule
from benchmarks.harness.step_seconds import recomputing_model
from foreroute import layout
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import Executor, FetchPath
from foreroute.simulate.workload import WORKLOADS
from foreroute.testing import megatron_on_cpu
from foreroute.trace import RoutingSpec, RoutingTrace

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
"""The weights of an expert are as many bytes as 192 rows."""
HEAD_WIDTH = 64
MEGATRON = {
    "num_layers": SIZES["num_hidden_layers"],
    "hidden_size": SIZES["hidden_size"],
    "kv_channels": HEAD_WIDTH,
    "ffn_hidden_size": SIZES["moe_intermediate_size"],
    "num_moe_experts": SIZES["num_experts"],
    "moe_router_topk": SIZES["num_experts_per_tok"],
    "moe_ffn_hidden_size": SIZES["moe_intermediate_size"],
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""The same model, beside what `megatron_plan.SIZES` says; its layers are computed anew in backward passes too."""
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
class Step:
    """Micro-batches of a rank, on their routes.

    Attributes:
        counts_MLGE: int32 [M, L, G, E], of all ranks.
        home_LE: int16 [L, E].
        run: all micro-batches under a plan, or with every expert at home; with backward passes or without.
    """

    counts_MLGE: NDArray[np.int32]
    home_LE: NDArray[np.int16]
    run: Callable[[StepPlan | None, bool], None]


class SpreadModel(Protocol):
    """A model that is spread over the laboratory."""

    def step(self, *, seed: int, sequences: int, at_home: bool = False) -> Step:
        """The second step of a run: the first is what methods know that plan from the step before."""

    def move_homes(self, home_LE: NDArray[np.integer]) -> None:
        """Of all experts, before steps are made."""

    def close(self) -> None:
        """Give back what ranks share."""


def spread_model(nodes: Nodes, rank: int) -> SpreadModel:
    """The same weights each time. A collective call."""
    return _OnHF(nodes, rank) if nodes.executor == "hf" else _OnMegatron(nodes, rank)


def drawn_counts(nodes: Nodes, *, seed: int, step: int, sequences: int, at_home: bool = False) -> NDArray[np.int32]:
    """int32 [M, L, S, E], of every sequence of a step, rank by rank; all of one length.

    With `at_home` experts of a sequence's own rank are those that it likes best, so that less crosses.
    """
    load = replace(
        WORKLOADS["R8"],
        num_ranks=nodes.num_ranks * sequences,
        num_experts=SIZES["num_experts"],
        top_k=SIZES["num_experts_per_tok"],
        num_micro_steps=MICRO_STEPS,
        num_layers=SIZES["num_hidden_layers"],
        sequences_per_rank=(1, 1),
        mean_length=1000 * TOKENS,
        longest=TOKENS,
    )
    counts = load.draw(seed=seed, step=step).counts()
    if at_home:
        counts = np.sort(counts, axis=-1)[..., ::-1].copy()
        for source in range(counts.shape[2]):
            first = source // sequences * SIZES["num_experts"] // nodes.num_ranks
            counts[:, :, source] = np.roll(counts[:, :, source], first, axis=-1)
    return counts


def _drawn(
    spec: RoutingSpec, nodes: Nodes, rank: int, seed: int, sequences: int, at_home: bool
) -> tuple[list[torch.Tensor], list[RoutingTrace]]:
    """The micro-batches of a rank in the second step of a run, whose first one is what is known before."""
    counts_MLSE = drawn_counts(nodes, seed=seed, step=1, sequences=sequences, at_home=at_home)
    mine = counts_MLSE[:, :, rank * sequences : (rank + 1) * sequences]
    rng = np.random.default_rng([seed, rank])
    batches = [torch.from_numpy(rng.integers(0, SIZES["vocab_size"], (sequences, TOKENS))) for _ in mine]
    return batches, [_routed(spec, batch, each, rng) for batch, each in zip(batches, mine, strict=True)]


def _routed(
    spec: RoutingSpec, batch: torch.Tensor, counts_LSE: NDArray[np.integer], rng: np.random.Generator
) -> RoutingTrace:
    """Routes of these counts: an expert's tokens are neighbours, in an order drawn for each layer."""
    ids = np.empty((len(batch), TOKENS, spec.num_layers, spec.top_k), np.int64)
    for layer, sequence in np.ndindex(*counts_LSE.shape[:2]):
        expert_A = np.repeat(np.arange(spec.num_experts), counts_LSE[layer, sequence])
        # an expert has no more assignments than there are tokens, so that no token gets it twice
        ids[sequence, rng.permutation(TOKENS), layer] = expert_A.reshape(spec.top_k, TOKENS).T
    return RoutingTrace.from_sequences(spec, list(batch.numpy()), list(ids))


class _OnHF:
    def __init__(self, nodes: Nodes, rank: int) -> None:
        self._nodes, self._rank, self._routed = nodes, rank, recomputing_model(SIZES, nodes.paths)

    def step(self, *, seed: int, sequences: int, at_home: bool = False) -> Step:
        batches, traces = _drawn(
            self._routed.spec, self._nodes, self._rank, seed=seed, sequences=sequences, at_home=at_home
        )
        rows_M = [self._routed.rows(trace) for trace in traces]
        counts_MLGE = self._routed.gather_counts(rows_M)
        bench = Bench(self._routed, batches, traces, rows_M, counts_MLGE)

        def run(plan: StepPlan | None, updating: bool) -> None:
            Bench.number += 1
            bench.step(plan, updating=updating)

        return Step(counts_MLGE, self._routed.home_LE, run)

    def move_homes(self, home_LE: NDArray[np.integer]) -> None:
        self._routed.move_homes(home_LE)

    def close(self) -> None:
        self._routed.close()


class _OnMegatron:
    def __init__(self, nodes: Nodes, rank: int) -> None:
        megatron_on_cpu.install()
        from megatron.core import parallel_state

        from foreroute.adapters import megatron

        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=nodes.num_ranks, create_gloo_process_groups=False
            )
        self._nodes, self._rank = nodes, rank
        self._model = gpt_model({"expert_model_parallel_size": nodes.num_ranks, **MEGATRON})
        self._routed = megatron.attach(self._model)

    def step(self, *, seed: int, sequences: int, at_home: bool = False) -> Step:
        routed = self._routed
        tokens, traces = _drawn(routed.spec, self._nodes, self._rank, seed, sequences, at_home)
        whole = [layout.pad(trace.lengths, side="right", order="sbhd") for trace in traces]
        shards = [routed.shard(trace, each) for trace, each in zip(traces, whole, strict=True)]
        batches = [{"tokens": t, "routes": r} for t, r in zip(tokens, shards, strict=True)]
        counts_MLGE = routed.gather_counts(shards)

        def run(plan: StepPlan | None, updating: bool) -> None:
            executing = routed.execute(plan, counts_MLGE, shards) if plan else None
            forward = routed.replaying(forward_step)
            run_schedule(self._model, forward, batches, executing=executing, forward_only=not updating)

        return Step(counts_MLGE, routed.home_LE, run)

    def move_homes(self, home_LE: NDArray[np.integer]) -> None:
        self._routed.move_homes(home_LE, None)

    def close(self) -> None:
        """Nothing is shared."""
