"""What executing a plan costs and brings on 2 and 4 gloo processes of one machine.

One step of four micro-steps, forward and backward, on skewed routes that are replayed: under the plan, and with every
expert at its home, in turn. The busiest rank's assignments are those that were computed. On a machine with fewer cores
than processes a balanced step is no faster, since all of the work is done by the same cores; overlap is not measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.multiprocessing.spawn import spawn

from benchmarks.pairs import compare
from foreroute import balance
from foreroute.adapters import hf
from foreroute.balance import Links, PlanOptions, StepPlan, Topology
from foreroute.experts import BatchRows, PlacedModel
from foreroute.trace import RoutingTrace
from foreroute.transfer import Cell
from foreroute.transfer.engine import TransferEngine
from foreroute.transfer.exchange import PeerGroup
from foreroute.transfer.records import TransferOptions

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
MICRO_STEPS, BATCH = 4, (4, 64)
SLOTS = 2
LINKS = Links(2e9, 1e9, 1e10, 5e-5, 1e-4)


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of rank 0 on 2 and on 4 processes."""
    pairs = 3 if quick else 20
    by_ranks = {str(num_ranks): _measured(num_ranks, pairs) for num_ranks in (2, 4)}
    worst = {
        name: max(figures[name] for figures in by_ranks.values())
        for name in ("executed_over_planned", "bytes_over_least", "host_over_direct")
    }
    return {
        "metrics": worst | {"by_ranks": by_ranks},
        "baselines": {"busiest_over_mean_at_home": {n: f["busiest_over_mean_at_home"] for n, f in by_ranks.items()}},
        "setting": {"sizes": SIZES, "micro_steps": MICRO_STEPS, "batch": BATCH, "slots": SLOTS, "pairs": pairs},
    }


@dataclass(frozen=True, eq=False)
class Bench:
    """One rank's part of the step."""

    routed: hf.RoutedModel
    placed: PlacedModel
    batches: list[torch.Tensor]
    traces: list[RoutingTrace]
    counts_MLGE: NDArray[np.int32]

    @classmethod
    def of(cls, rank: int, num_ranks: int) -> Bench:
        """With routes that favour the first experts, as trained routers favour some."""
        model = hf.build_model("qwen3_moe", seed=0, **SIZES)
        routed = hf.attach(model)
        return cls._routed(routed, hf.distribute(model, timeout_s=120), rank, num_ranks, 0.3, BATCH)

    def with_routes(self, rank: int, skew: float, sequences: int) -> Bench:
        """The same model on other micro-batches, of so many sequences and with routes that skewed."""
        num_ranks = self.counts_MLGE.shape[2]
        return self._routed(self.routed, self.placed, rank, num_ranks, skew, (sequences, BATCH[1]))

    @classmethod
    def _routed(
        cls,
        routed: hf.RoutedModel,
        placed: PlacedModel,
        rank: int,
        num_ranks: int,
        skew: float,
        shape: tuple[int, int],
    ) -> Bench:
        rng = np.random.default_rng(rank)
        batches = [torch.from_numpy(rng.integers(0, 256, shape)) for _ in range(MICRO_STEPS)]
        traces = [_skewed(routed, batch, rng, skew) for batch in batches]
        rows = [BatchRows.replayed(trace, batch).routed_LE for trace, batch in zip(traces, batches, strict=True)]
        mine_MLE = torch.from_numpy(np.stack([counts for counts in rows if counts is not None]).astype(np.int32))
        parts = [torch.empty_like(mine_MLE) for _ in range(num_ranks)]
        dist.all_gather(parts, mine_MLE)
        return cls(routed, placed, batches, traces, torch.stack(parts, dim=2).numpy())

    def plan(self, options: PlanOptions) -> StepPlan:
        """Of the step."""
        return balance.plan(self.counts_MLGE, self.topology, options, home_LE=self.placed.home_LE)

    @property
    def topology(self) -> Topology:
        """One node."""
        num_ranks = self.counts_MLGE.shape[2]
        return Topology(num_ranks, num_ranks, SLOTS, LINKS)

    def step(self, plan: StepPlan) -> NDArray[np.int64]:
        """Forward and backward of all micro-steps; int64 [M, L], assignments that this rank computed."""
        self.placed.begin_step(0, plan, self.counts_MLGE)
        executed = []
        for m, (batch, trace) in enumerate(zip(self.batches, self.traces, strict=True)):
            rows = BatchRows.replayed(trace, batch)
            with self.routed.replay(trace), self.placed.executing(m, rows) as execution:
                logits = self.routed.model(input_ids=batch, use_cache=False).logits
                logits.log_softmax(-1)[..., 0].mean().backward()
            executed.append(execution.executed_L)
        self.routed.model.zero_grad(set_to_none=True)
        return np.stack(executed)

    def engine(self, peers: PeerGroup, **options: Any) -> TransferEngine:
        """That has published the weights."""
        engine = TransferEngine(self.placed.homes, self.topology, TransferOptions(timeout_s=120, **options), peers)
        engine.publish()
        return engine


def _skewed(routed: hf.RoutedModel, batch: torch.Tensor, rng: np.random.Generator, skew: float) -> RoutingTrace:
    spec, tokens = routed.spec, batch.numpy()
    favour_E = np.linspace(skew, 0, spec.num_experts)
    scores = [rng.random((len(row), spec.num_layers, spec.num_experts)) + favour_E for row in tokens]
    ids = [np.argsort(-score, axis=-1)[..., : spec.top_k] for score in scores]
    return RoutingTrace.from_sequences(spec, list(tokens), ids)


def _measured(num_ranks: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (num_ranks, pairs, folder), num_ranks)
        figures: dict[str, Any] = torch.load(Path(folder) / "figures.pt", weights_only=True)
    return figures


def _work(rank: int, num_ranks: int, pairs: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    bench, peers = Bench.of(rank, num_ranks), PeerGroup(timeout_s=120)
    figures = _steps(bench, peers, pairs) | _fetches(bench, peers, pairs)
    if rank == 0:
        torch.save(figures, Path(folder) / "figures.pt")
    dist.destroy_process_group()


def _steps(bench: Bench, peers: PeerGroup, pairs: int) -> dict[str, Any]:
    plan, at_home = bench.plan(PlanOptions()), bench.plan(PlanOptions(replicas=False))
    with closing(bench.engine(peers, slots="layer")) as engine:
        bench.placed.use(engine)
        busiest = {name: _busiest(bench.step(chosen)) for name, chosen in (("planned", plan), ("home", at_home))}
        engine.publish()
        engine.take_records()
        bench.step(plan)
        fetched = [record for record in engine.take_records() if record.kind == "fetch"]
        moved = _summed(sum(record.host_bytes + record.direct_bytes for record in fetched))
        seconds = compare(lambda: bench.step(plan), lambda: bench.step(at_home), pairs=pairs)
    expert_bytes = sum(shard[0].numel() * shard.element_size() for shard in bench.placed.homes[0].values())
    mean = float(plan.bound_ML.sum())
    return {
        "executed_over_planned": busiest["planned"] / int(plan.max_load_ML.sum()),
        "bytes_over_least": moved / (int(plan.fetched_R.sum()) * expert_bytes),
        "busiest_over_mean": round(busiest["planned"] / mean, 4),
        "busiest_over_mean_at_home": round(busiest["home"] / mean, 4),
        "planned_over_static_step": _rounded(asdict(seconds)),
    }


def _fetches(bench: Bench, peers: PeerGroup, pairs: int) -> dict[str, Any]:
    """The replicas of all cells, one after the other, into slots that hold nothing of use."""
    plan = bench.plan(PlanOptions(slots="shared"))

    def fetching(engine: TransferEngine) -> Callable[[], None]:
        def fetch_all() -> None:
            engine.begin_step(0, plan, updating=False)
            for m, layer in np.ndindex(*plan.shape[:2]):
                engine.fetch(Cell(0, m, layer), bench.placed.homes[layer])
            dist.barrier()

        return fetch_all

    with (
        closing(bench.engine(peers, paths="host", prefetch=0)) as host,
        closing(bench.engine(peers, paths="direct", prefetch=0)) as direct,
    ):
        seconds = compare(fetching(host), fetching(direct), pairs=3 * pairs)
    return {"host_over_direct": round(seconds.ratio, 4), "host_over_direct_pairs": _rounded(asdict(seconds))}


def _busiest(executed_ML: NDArray[np.int64]) -> int:
    """The sum over cells of the busiest rank's assignments."""
    most = torch.from_numpy(executed_ML.copy())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most.sum())


def _summed(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}
