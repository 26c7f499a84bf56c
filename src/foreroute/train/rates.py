"""Rates that the ranks that run this reach, measured: those of a topology file, by which plans are priced.

A small model with layers of the file's shape runs three steps in turn, recompute and update of each:

    at home, even    ─┬─ seconds of a row, and of a layer beside its rows
    at home, uneven  ─┤
    under its plan   ─┴─ seconds of a replica

A row takes the seconds by which uneven steps are longer, since these are what a plan saves. Links, the way through host
memory, planning and votes are timed by themselves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters import hf
from foreroute.adapters.hf.loading import spread
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.costs.cluster_file import Cluster, Rates, described
from foreroute.costs.fitting import find_rates, with_values
from foreroute.costs.model import CostModel, Hardware, ModelShape
from foreroute.costs.pricing import step_parts
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.errors import ConfigError
from foreroute.plan import Links, PlanOptions, StepPlan, Topology
from foreroute.plan.capabilities import takes_host_memory
from foreroute.plan.schedule import ExecutionSchedule
from foreroute.planner import plan
from foreroute.trace import RoutingTrace
from foreroute.train.policy import Alone, checkpoint_activations

LAYERS, MICRO_STEPS, VOCABULARY, HEAD_WIDTH, SEQUENCE = 2, 2, 256, 64, 256
UNEVEN = 0.6
"""Added to the scores of the first expert, and less to the next: the slowest of two ranks has 1.6 times the mean."""
ROUNDS = 5
"""Runs of each measurement; the quickest counts, since what disturbs a machine only adds."""
MESSAGE = 1 << 20
"""Elements of 4 bytes that are sent to each peer where bandwidth is measured."""
OF_REPLICAS = ("replica_s", "replica_backward_s")
FOUND = ("gemm_flops_per_s", "backward_products", "tile_rows", "layer_s", *OF_REPLICAS, "publish_bytes_per_s")
"""Rates of `Hardware` that are measured. The others are the file's, and the seconds of a layer make up for them."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""By bytes of a weight."""


class MeasuredStep(NamedTuple):
    """Micro-batches of this rank, int64 [B, T] each, their routes, the counts of all ranks, and the plan."""

    batches: Sequence[Tensor]
    rows_M: Sequence[TraceRows]
    counts_MLGE: NDArray[np.int32]
    plan: StepPlan


def measure_rates(cluster: Cluster, ranks: Alone, device: torch.device, tokens: int) -> Rates:
    """Measure on all ranks of the default process group, with `tokens` of a rank in a micro-step. A collective call.

    Returns what was measured by table and key of a topology file, the same on all ranks. Raises `ConfigError` when the
    file is of other ranks, weights of its bytes are not measured, or no such model can be.
    """
    costs, topology = cluster.costs, cluster.topology
    if topology.num_ranks != ranks.size:
        raise ConfigError(f"the file is of {topology.num_ranks} ranks, and {ranks.size} are here; start as many")
    if costs.model.weight_bytes not in DTYPES:
        raise ConfigError(f"weight_bytes is {costs.model.weight_bytes}; rates are measured for 2 or 4")
    clock, routed = _Clock(ranks, device), _small_model(costs.model, device)
    routed.use(TransferOptions(costs.paths, costs.prefetch))
    with closing(routed):
        known = replace(costs.hardware, links=_links(clock, topology), replica_s=0.0, replica_backward_s=0.0)
        if takes_host_memory(costs.paths):
            known = _with_host_memory(clock, topology, routed, known)
        if device.type == "cpu":
            known = replace(known, tile_rows=1)
        costs = replace(costs, hardware=known, sequence_tokens=float(SEQUENCE))
        steps = _steps(routed, replace(topology, links=known.links), clock, tokens)
        seconds_XS, begin_s = _timed(clock, routed, steps)
        hardware = fitted(costs, steps, seconds_XS)
        are_timed = len(steps[-1].plan.hosts.expert_R) > 0
        found = {name: getattr(hardware, name) for name in FOUND if are_timed or name not in OF_REPLICAS}
        plan_s_per_count = _planning(clock, steps[-1], costs)
    rates = {
        "hardware": found,
        "links": vars(known.links),
        "costs": {"plan_s_per_count": plan_s_per_count, "begin_s": begin_s},
    }
    # to four digits; whole numbers stay, and what nobody measured is left to the file
    before = described(cluster)
    return {
        table: {
            key: value if isinstance(value, int) else float(f"{value:.4g}")
            for key, value in of.items()
            if value != before[table][key]
        }
        for table, of in rates.items()
        if of != before[table]
    }


def fitted(costs: CostModel, steps: Sequence[MeasuredStep], seconds_XS: NDArray[np.float64]) -> Hardware:
    """Find the hardware with which the cost model takes as long as steps took: even, uneven, and that under a plan.

    `seconds_XS` is float64 [3, 2], recompute and update of each. What `costs` knows stays, links above all.
    """
    even, _, planned = steps
    # to begin with, all of the even recompute is rows, and each layer takes a tenth of it beside them
    row_s = float(seconds_XS[0, 0]) / int(even.plan.max_load_ML.sum())
    layer_s = 0.1 * float(seconds_XS[0, 0]) / even.plan.max_load_ML.size
    begin = {"gemm_flops_per_s": 2 * costs.model.expert_parameters / row_s, "backward_products": 1.0}
    costs = with_values(costs, begin | {"layer_s": layer_s})

    def predicted(of_costs: CostModel, some: Sequence[MeasuredStep]) -> NDArray[np.float64]:
        return np.array(
            [
                step_parts(one.plan.hosts, one.counts_MLGE, one.plan.topology, of_costs, one.plan.slots).sum(axis=1)
                for one in some
            ]
        )

    def find(
        names: Sequence[str], take: Callable[[NDArray[np.float64]], NDArray[np.float64]], *places: int
    ) -> CostModel:
        some, measured_XS = [steps[x] for x in places], seconds_XS[list(places)]
        measured_V = take(measured_XS)
        size_V = measured_XS[0, : len(measured_V)]  # of a whole pass: differences may be 0
        return find_rates(costs, names, lambda tried: take(predicted(tried, some)), measured_V, size_V).costs

    # One after the other: what a row takes is what plans save, and must not bend to levels, which hold much else.
    costs = find(("gemm_flops_per_s", "backward_products"), lambda found_XS: found_XS[1] - found_XS[0], 0, 1)
    costs = find(("layer_s",), lambda found_XS: found_XS[0, :1], 0)
    if len(planned.plan.hosts.expert_R):
        names = ("replica_s", "replica_backward_s")
        costs = with_values(costs, dict.fromkeys(names, layer_s))
        costs = find(names, lambda found_XS: found_XS[0], 2)
    return costs.hardware


class _Clock:
    """Clock of work that all ranks do at the same time: seconds of the slowest. Calling it is a collective call."""

    def __init__(self, ranks: Alone, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def __call__(self, work: Callable[[], object]) -> float:
        self._synchronize()
        self.ranks.max([0])  # nobody begins before all are there
        begun = time.perf_counter()
        work()
        self._synchronize()
        return float(self.ranks.all_gather(np.array([time.perf_counter() - begun])).max())

    def quickest(self, work: Callable[[], object]) -> float:
        """Seconds of the quickest of several runs."""
        return min(self(work) for _ in range(ROUNDS + 1))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _small_model(shape: ModelShape, device: torch.device) -> hf.RoutedTransformer:
    """Make layers of the shape, whose activations are recomputed in backward."""
    heads = max(1, shape.attention_width // HEAD_WIDTH)
    model: Any = hf.build_model(
        "qwen3_moe",
        seed=0,
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_WIDTH,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.intermediate,
        norm_topk_prob=True,
    )
    model = spread(model.to(DTYPES[int(shape.weight_bytes)]), device).train()
    checkpoint_activations(model)
    return hf.attach(model)


def _steps(routed: hf.RoutedTransformer, topology: Topology, clock: _Clock, tokens: int) -> list[MeasuredStep]:
    """Make an even and an uneven step at home, and the uneven one under its plan."""
    found, spec = [], routed.spec
    for skew, num_plans in ((0.0, 1), (UNEVEN, 2)):
        shape = max(1, tokens // SEQUENCE), SEQUENCE
        rng, batches, rows_M = np.random.default_rng([clock.ranks.rank, num_plans]), [], []
        for _ in range(MICRO_STEPS):
            batch = rng.integers(0, VOCABULARY, shape)
            scores = rng.random((*shape, LAYERS, spec.num_experts)) + np.linspace(skew, 0, spec.num_experts)
            ids = np.argsort(-scores, axis=-1)[..., : spec.top_k]
            batches.append(torch.from_numpy(batch).to(clock.device))
            rows_M.append(routed.rows(RoutingTrace.from_sequences(spec, list(batch), list(ids))))
        counts = routed.gather_counts(rows_M)
        found += [
            MeasuredStep(batches, rows_M, counts, plan(counts, topology, options, home_LE=routed.home_LE))
            for options in (PlanOptions(replicas=False), PlanOptions())[:num_plans]
        ]
    return found


def _timed(
    clock: _Clock, routed: hf.RoutedTransformer, steps: Sequence[MeasuredStep]
) -> tuple[NDArray[np.float64], float]:
    """Time each step: seconds of recompute and update, float64 [steps, 2], and those of their begin and end."""
    seconds_XS, begin_s, number = np.full((len(steps), 2), math.inf), math.inf, 0
    inner: list[float] = []

    def execute(step: MeasuredStep, pass_index: int, number: int) -> None:
        with routed.execute(step.plan, step.counts_MLGE, step.rows_M, step=number):
            inner.append(clock(partial(_run, routed, step, updating=pass_index == 1)))

    # all kinds in each round, so that a machine that slows down slows all of them
    for _ in range(ROUNDS + 1):
        for index in np.ndindex(*seconds_XS.shape):
            number += 1
            whole_s = clock(partial(execute, steps[index[0]], index[1], number))
            seconds_XS[index] = min(seconds_XS[index], inner[-1])
            begin_s = min(begin_s, whole_s - inner[-1])
    return seconds_XS, max(begin_s, 0.0)


def _run(routed: hf.RoutedTransformer, step: MeasuredStep, *, updating: bool) -> None:
    """Run the forwards of a step, and its backwards where it updates; no weight changes."""
    for batch, rows in zip(step.batches, step.rows_M, strict=True):
        with torch.set_grad_enabled(updating), routed.replay(rows):
            loss = routed.model(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)[..., 0].mean()
            if updating:
                loss.backward()
    routed.model.zero_grad(set_to_none=True)


def _links(clock: _Clock, topology: Topology) -> Links:
    """Measure the links to peers that are there; the others stay those of the file."""
    links, node_G, rank = topology.links, topology.node_G, clock.ranks.rank
    for name, is_near in (("node", True), ("cluster", False)):
        to_G = ((node_G == node_G[rank]) == is_near) & (np.arange(len(node_G)) != rank)
        if to_G.any():
            # an all-to-all of one element is all latency
            latency_s, whole_s = (_exchange_s(clock, to_G * size) for size in (1, MESSAGE))
            bytes_per_s = 4 * MESSAGE * int(to_G.sum()) / max(whole_s - latency_s, 1e-9)
            links = replace(links, **{f"{name}_bytes_per_s": bytes_per_s, f"{name}_latency_s": latency_s})
    return links


def _with_host_memory(clock: _Clock, topology: Topology, routed: hf.RoutedTransformer, known: Hardware) -> Hardware:
    """Measure the bytes per second that a rank publishes, and reads of what another one has published."""
    assert routed.spread is not None, "it was spread"
    homes = routed.spread.load()
    home_LE, per_node = routed.home_LE, topology.ranks_per_node
    source = clock.ranks.rank // per_node * per_node + (clock.ranks.rank + 1) % per_node
    slots = {name: shard.detach()[0].clone() for name, shard in homes[0].items()}
    with closing(HostMemory(RankConsensus(), homes, per_node)) as memory:

        def publish() -> None:
            memory.forget()
            memory.publish(home_LE, np.ones((*home_LE.shape, per_node), np.bool_))

        publish_s = clock.quickest(publish)
        published_by = memory.expert(0, int(np.flatnonzero(home_LE[0] == source)[0]))
        fetch_s = clock.quickest(lambda: [slot.copy_(published_by[name]) for name, slot in slots.items()])
    published = sum(shard.nbytes for home in homes.values() for shard in home.values())
    fetched = sum(slot.nbytes for slot in slots.values())
    links = replace(known.links, host_bytes_per_s=fetched / fetch_s)
    return replace(known, links=links, publish_bytes_per_s=published / publish_s)


def _exchange_s(clock: _Clock, elements_G: NDArray[np.integer]) -> float:
    """Time an all-to-all with these numbers of elements of 4 bytes to and from each rank."""
    sizes = elements_G.tolist()
    sent, received = (torch.ones(sum(sizes), device=clock.device) for _ in range(2))
    return clock.quickest(lambda: dist.all_to_all_single(received, sent, sizes, sizes))


def _planning(clock: _Clock, step: MeasuredStep, costs: CostModel) -> float:
    """Time planning a cell and compiling its schedule, in seconds for each of its counts."""
    counts, topology = np.tile(step.counts_MLGE, (4, 1, 1, 1)), step.plan.topology

    def make() -> None:
        made = plan(counts, topology, home_LE=step.plan.home_LE, costs=costs)
        ExecutionSchedule(made, counts, clock.ranks.rank).cell(len(counts) - 1, LAYERS - 1)

    return clock.quickest(make) / counts.size
