"""Seconds of a Megatron step under a plan over those of the same step with every expert at home, on two processes.

Each process has a core, and experts dominate the step, as in `step_seconds`; counting and planning are on the clock.
Whether a pass goes by the plan or at homes is decided by rates that `foreroute measure` finds in the same run.
*Static* is Megatron as it is, attached and replaying the same routes. *Attached* is a step whose wrapped forward is
given no routes, over the same step of a model that was never attached. *Predicted* is what the simulator makes of the
very same plans, without counting and planning, with rates that were fitted to other skews and sizes on the same
processes. Also what the all-to-all dispatcher asks of other ranks and waits for, with and without.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness.execution_bench import LINKS, drawn, in_processes, measured_cluster
from benchmarks.harness.executor_counts import launches, posting
from benchmarks.harness.pairs import compare, near_one
from benchmarks.harness.step_prediction import PASSES, TimedStep, predict_ratios, processes_config, time_steps
from benchmarks.harness.step_seconds import LEVEL_SLOTS, PLANNED
from foreroute import layout, planner
from foreroute.costs.cluster_file import Cluster, cluster_toml
from foreroute.plan import PlanOptions, StepPlan, Topology
from foreroute.testing import megatron_on_cpu

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 128,
    "ffn_hidden_size": 512,
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 512,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "gated_linear_unit": True,
}
VOCABULARY, SHAPE = 256, (4, 256)
"""Tokens; sequences of a micro-batch and tokens of each."""
MILD = {"least": 0.2, "slight": 0.4, "mild": 0.8}
SKEWS = {"low": 0.3, "middle": 0.6, "high": 1.0}
"""As in `step_seconds`, static imbalance about 1.05, 1.1, 1.2, 1.3, 1.6 and 1.8."""
OTHER_SKEWS, OTHER_SEQUENCES, ROUNDS = (0.15, 0.45, 0.8), (2, 6), 5
"""Of the steps that rates are fitted to, and how often each is run; none is a step that is predicted."""
NAMES = (
    *("planned_over_static", "predicted_planned_over_static", "static_imbalance", "attached_ratio", "gains"),
    *("collectives_saved", "host_waits", "waits_per_layer"),
    *("posted_behind_rows", "fetches_per_cell", "votes_per_step", "aten_over_unpatched"),
)
Parts = tuple[dict[str, Any], dict[str, list[TimedStep]], list[TimedStep]]


def planned_step(pairs: int) -> dict[str, Any]:
    """Ratios of seconds, `planned_over_static` by pass and skew and `attached_ratio`, and what goes with them.

    Beside them `predicted_planned_over_static` and `gains` by pass and skew, `static_imbalance` by skew,
    `collectives_saved` and `host_waits`, the most of these per layer and micro-step under a plan, and what one rank
    posts, asks and launches (`Bench.counted`). Ratios are medians over pairs that were run in turn, with the 95 %
    interval of the median. Without pairs nothing is timed, and without two cores nothing is counted either; it is None
    then.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return dict.fromkeys(NAMES)
    config = processes_config(
        hub_sizes(),
        2,
        slots=LEVEL_SLOTS,
        sequence_tokens=SHAPE[1],
        head_width=SIZES["kv_channels"],
        paths="direct",
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(cluster_toml(config.described()))
        parts: Parts = in_processes(_measured, 2, pairs, path)
    found, cases, others = parts
    if not pairs:
        return dict.fromkeys(NAMES) | found
    return found | {"predicted_planned_over_static": predict_ratios(others, cases, config)}


def hub_sizes() -> dict[str, Any]:
    """`SIZES` by the names of Hugging Face."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": SIZES["hidden_size"],
        "num_hidden_layers": SIZES["num_layers"],
        "num_attention_heads": SIZES["num_attention_heads"],
        "num_key_value_heads": SIZES["num_query_groups"],
        "num_experts": SIZES["num_moe_experts"],
        "num_experts_per_tok": SIZES["moe_router_topk"],
        "moe_intermediate_size": SIZES["moe_ffn_hidden_size"],
    }


def _measured(rank: int, num_ranks: int, pairs: int, path: Path) -> Parts:
    """What was found; what was planned and static in each case; and other steps, timed."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    megatron_on_cpu.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks, create_gloo_process_groups=False)
    found = _counted(rank, num_ranks)
    return _timed(rank, num_ranks, pairs, path, found) if pairs else (found, {}, [])


def _timed(rank: int, num_ranks: int, pairs: int, path: Path, found: dict[str, Any]) -> Parts:
    found |= {name: {pass_name: {} for pass_name in PASSES} for name in ("planned_over_static", "gains")}
    found["static_imbalance"] = {}
    bench = Bench(rank, num_ranks, 0.0, {}, measured_cluster(path, SHAPE[0] * SHAPE[1]))
    cases: dict[str, list[TimedStep]] = {}
    for name in (*MILD, *SKEWS):
        bench.take_routes(rank, SKEWS.get(name, 0.0), zipf=MILD.get(name, 0.0))
        cases[name] = bench.steps(name)
        found["static_imbalance"][name] = round(bench.static_imbalance, 3)
        for pass_name, updates in PASSES.items():
            planned, static = partial(bench.paid_step, not updates), partial(bench.step, None, not updates)
            ratio = compare(planned, static, pairs=pairs)
            found["planned_over_static"][pass_name][name] = ratio.shown()
            found["gains"][pass_name][name] = round(cases[name][0].plan.gains[pass_name], 4)
    found |= near_one("attached", compare(*bench.without_routes(), pairs=pairs))
    others = []
    for skew, sequences in itertools.product(OTHER_SKEWS, OTHER_SEQUENCES):
        bench.take_routes(rank, skew, (sequences, SHAPE[1]))
        others += bench.timed(f"skew {skew}, {sequences} sequences", ROUNDS)
    return found, cases, others


def _counted(rank: int, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {"collectives_saved": {}, "host_waits": {}}
    for recompute, settings in {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    }.items():
        counted = Bench(rank, num_ranks, SKEWS["middle"], settings)
        (gathers, waits), (gathers_left, waits_left) = counted.asked(False), counted.asked(True)
        found["collectives_saved"][recompute] = gathers - gathers_left
        found["host_waits"][recompute] = {"static": waits, "planned": waits_left}
    found["waits_per_layer"] = max(waits["planned"] for waits in found["host_waits"].values())
    return found | Bench(rank, num_ranks, SKEWS["middle"], {}).counted()


class Bench:
    """A model that two ranks share, and micro-batches on routes that favour the experts of one of them."""

    def __init__(
        self, rank: int, num_ranks: int, skew: float, settings: dict[str, Any], cluster: Cluster | None = None
    ) -> None:
        from foreroute.adapters import megatron

        self._settings = {"expert_model_parallel_size": num_ranks, **settings}
        self._model = gpt_model(self._settings)
        self._num_ranks, self._cluster = num_ranks, cluster
        self._routed = megatron.attach(self._model)
        self.take_routes(rank, skew)

    def take_routes(self, rank: int, skew: float, shape: tuple[int, int] = SHAPE, zipf: float = 0.0) -> None:
        """Other micro-batches, on routes as `drawn` has them."""
        tokens, traces = drawn(self._routed.spec, rank, skew=skew, zipf=zipf, shape=shape)
        whole = [layout.pad(trace.lengths, side="right", order="sbhd") for trace in traces]
        self._shards = [self._routed.shard(trace, each) for trace, each in zip(traces, whole, strict=True)]
        self._batches = [{"tokens": t, "routes": r} for t, r in zip(tokens, self._shards, strict=True)]
        self._counts_MLGE = self._routed.gather_counts(self._shards)

    @property
    def static_imbalance(self) -> float:
        """The slowest rank's assignments over the mean, with every expert at home, over all cells."""
        loads_MLE = self._counts_MLGE.sum(2)
        at_home = [(loads_MLE * (self._routed.home_LE == rank)).sum(2) for rank in range(self._num_ranks)]
        return float(np.max(at_home, axis=0).sum() / loads_MLE.sum() * self._num_ranks)

    def steps(self, name: str) -> list[TimedStep]:
        """The step under its plan and with every expert at home, which were not timed."""
        options = PLANNED, PlanOptions(replicas=False)
        return [TimedStep(name, self._counts_MLGE, self._planned(self._counts_MLGE, each)) for each in options]

    def timed(self, name: str, rounds: int) -> list[TimedStep]:
        """The same, timed in turn, round after round."""

        def seconds(plan: StepPlan | None, updating: bool) -> float:
            begun = time.perf_counter()
            self.step(plan, not updating)  # over when it is over on both ranks
            return time.perf_counter() - begun

        planned, at_home = self.steps(name)
        steps = [(planned, partial(seconds, planned.plan)), (at_home, partial(seconds, None))]
        return time_steps(steps, rounds=rounds)

    def paid_step(self, forward_only: bool) -> None:
        """All that a planned step takes: rows are counted, the plan is made, and it is executed."""
        self.step(self._planned(self._routed.gather_counts(self._shards), PLANNED), forward_only)

    def step(self, plan: StepPlan | None, forward_only: bool) -> None:
        """All micro-batches on their routes, under the plan or at home."""
        executing = self._routed.execute(plan, self._counts_MLGE, self._shards) if plan else None
        forward = self._routed.replaying(forward_step)
        run_schedule(self._model, forward, self._batches, executing=executing, forward_only=forward_only)

    def _planned(self, counts_MLGE: NDArray[np.integer], options: PlanOptions) -> StepPlan:
        topology, costs = Topology(self._num_ranks, self._num_ranks, LEVEL_SLOTS, LINKS), None
        if self._cluster is not None:
            topology, costs = self._cluster.topology, self._cluster.costs
        return planner.plan(counts_MLGE, topology, options, home_LE=self._routed.home_LE, costs=costs)

    def without_routes(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Steps of micro-batches that bring no routes: of the attached model, and of an equal one that never was."""
        batches = [{"tokens": batch["tokens"]} for batch in self._batches]
        return (
            partial(run_schedule, self._model, self._routed.replaying(forward_step), batches),
            partial(run_schedule, gpt_model(self._settings), forward_step, batches),
        )

    def asked(self, planned: bool) -> tuple[float, float]:
        """Per layer and micro-batch: gathers of counts, and waits of the host for the device, of the dispatchers."""
        from megatron.core.transformer.moe import token_dispatcher as dispatchers

        gather: Callable[..., Any] = dispatchers.gather_from_sequence_parallel_region
        with (
            mock.patch.object(dispatchers, "gather_from_sequence_parallel_region", side_effect=gather) as gathers,
            mock.patch.object(type(torch.cuda.current_stream()), "synchronize") as waits,
        ):
            self.step(self.steps("")[0].plan if planned else None, False)
        cells = len(self._batches) * SIZES["num_layers"]
        return gathers.call_count / cells, waits.call_count / cells

    def counted(self) -> dict[str, float]:
        """What the second of two planned steps posts and asks, and operators over those of the unpatched model."""
        plan = self._planned(self._counts_MLGE, PLANNED)
        self.step(plan, False)
        layers = [module for module in self._model.modules() if type(module).__name__ == "MoELayer"]
        with posting(layers) as posted, self._routed.execute(plan, self._counts_MLGE, self._shards):
            begun = posted.questions
            run_schedule(self._model, self._routed.replaying(forward_step), self._batches)
            asked = posted.questions - begun
        unpatched = self.without_routes()[1]
        return {
            "posted_behind_rows": posted.num_behind_rows / posted.num_fetches,
            "fetches_per_cell": posted.num_fetches / int((plan.num_replicas_ML > 0).sum()),
            "votes_per_step": asked,
            "aten_over_unpatched": round(launches(lambda: self.step(plan, False)) / launches(unpatched), 4),
        }


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """As Megatron's schedules take it: the losses of the tokens of a batch, and what reduces them."""
    tokens = next(batches)["tokens"]
    width, device = tokens.shape[1], tokens.device
    positions = torch.arange(width, device=device).expand_as(tokens)
    ahead = torch.ones(width, width, dtype=torch.bool, device=device).triu(1)[None, None]
    losses = model(tokens, positions, ahead, labels=tokens.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"losses": losses.detach()})


def run_schedule(
    model: Any,
    forward: Callable[..., Any],
    batches: Sequence[dict[str, Any]],
    *,
    executing: AbstractContextManager[Any] | None = None,
    forward_only: bool = False,
) -> None:
    """Micro-batches through Megatron's schedule; over when it is over on all ranks."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad(set_to_none=True)
    dist.barrier()
    with executing or nullcontext(), torch.set_grad_enabled(not forward_only):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=batches[0]["tokens"].shape[1],
            micro_batch_size=len(batches[0]["tokens"]),
            forward_only=forward_only,
        )
    dist.barrier()


def gpt_model(settings: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    silu = {"activation_func": torch.nn.functional.silu}
    config = TransformerConfig(**{**megatron_on_cpu.CONFIG, **SIZES, **silu, **settings})
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=SHAPE[1],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).train()
