"""Worth of plans, simulated: every method over foreroute, and foreroute over forced balance, in both passes.

H100-class GPUs; workloads G8 to G64 and E256, the same tokens for every method. **Every second is modelled.** Planning
is measured here, on one thread.

`metrics.<model>.one_node` is what an executor carries out: 8 GPUs, a row for every assignment. `metrics.<model>.EP<n>`
is not: 8 nodes of 8, expert parallelism over 8 to 64 GPUs, deduplicated dispatch; `not_executed` says what is missing.
Both are for 8k tokens of a GPU in a micro-step and foreroute with two slots, stopping at 1.02 times the mean;
`by_tokens` has other sizes, and on 64 GPUs plain copies too.

Clusters grow in two ways. More groups at the same expert parallelism (`by_gpus`): every group plans its own step
(`planning_ms`), or one planner plans for all (`one_planner_over_recompute`). Larger groups (`by_ranks_of_a_group`): a
model of 256 experts over 16 to 256 ranks, whose cells take longer to plan. `first_micro_step_ms` is what is exposed of
a plan that begins with the recompute and is handed over micro-step by micro-step, which no executor does (decision
0010: a plan is whole when its step begins).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.balancers import OTHER_BALANCERS
from foreroute.simulate import SimulationRecord, parse_config, simulate

MODELS = {"qwen3-30b-a3b": "qwen3_30b_a3b", "qwen3-235b-a22b": "qwen3_235b_a22b"}
RANKS = (8, 16, 32, 64)
TOKENS = {"2k": 2048, "8k": 8192, "16k": 16_384}
METHODS = (
    *("static", "eplb_previous", "eplb_step", "eplb_micro_step"),
    *("foreroute", "foreroute_exact", "foreroute_traffic"),
)
FEW = ("static", "eplb_micro_step", "foreroute", "foreroute_traffic")
ALONE = ("static", "foreroute")
SKEWS = (0.5, 1.0, 2.0, 4.0)
MICRO_STEPS = 16
GPUS, LARGE_GROUPS = (64, 256, 1024, 4096), (16, 64, 128, 256)
"""Of clusters that grow, in groups of 64 or in one."""


def run(quick: bool) -> dict[str, Any]:
    """Figures by model and cluster; in `baselines` the seconds of every method."""
    drawn: dict[str, Any] = {"micro_steps": 4, "layers": 1, "groups": 1} if quick else {"layers": 4, "groups": 2}
    metrics: dict[str, Any] = {}
    seconds: dict[str, Any] = {}
    for preset, name in MODELS.items():
        clusters = {"one_node": (8, 8, ("copies",))} | {
            f"EP{ranks}": (64, ranks, ("dedup", "copies")) for ranks in RANKS
        }
        metrics[name], seconds[name] = {}, {}
        for place, (gpus, ranks, dispatchers) in clusters.items():
            simulated = partial(_simulated, preset, gpus, ranks, **drawn)
            main = simulated(methods=METHODS, dispatcher=dispatchers[0])
            metrics[name][place] = _figures(main) | {
                "by_tokens": {
                    f"{tokens}_{dispatcher}": _figures(simulated(methods=FEW, tokens=tokens, dispatcher=dispatcher))
                    for tokens in TOKENS
                    for dispatcher in dispatchers
                },
                "by_skew": {str(skew): _figures(simulated(skew=skew, dispatcher=dispatchers[0])) for skew in SKEWS},
            }
            seconds[name][place] = {record.name: round(record.training_s, 4) for record in main.methods}
    layers, groups = (1, 2) if quick else (2, 64)
    metrics["by_gpus"] = {
        str(gpus): _growth(_simulated("qwen3-30b-a3b", gpus, 64, layers=layers, groups=min(groups, gpus // 64)))
        for gpus in GPUS
    }
    metrics["by_ranks_of_a_group"] = {
        str(ranks): _growth(_simulated("deepseek-v3", 256, ranks, preset="G16" if ranks == 16 else "E256"))
        for ranks in (LARGE_GROUPS[:2] if quick else LARGE_GROUPS)
    }
    return {"metrics": metrics, "baselines": seconds}


def _simulated(
    model: str,
    gpus: int,
    ranks: int,
    *,
    methods: tuple[str, ...] = ALONE,
    tokens: str = "8k",
    dispatcher: str = "dedup",
    preset: str = "",
    skew: float = 1.0,
    micro_steps: int = MICRO_STEPS,
    layers: int = 1,
    groups: int = 1,
) -> SimulationRecord:
    """Simulate methods on a step that is drawn as uneven as a preset; others' balancers stand beside all methods."""
    size = {"tokens_per_rank": TOKENS[tokens], "micro_steps": micro_steps, "layers": layers, "groups": groups}
    values = {
        "cluster": {"gpus": gpus, "expert_parallel": ranks},
        "model": {"preset": model},
        "costs": {"dispatcher": dispatcher, "paths": "host"},
        "workload": {"preset": preset or f"G{ranks}", "skew": skew, **size},
        "methods": methods,
    }
    others = {"laer": OTHER_BALANCERS["laer"]} if methods == METHODS else {}
    return simulate(parse_config(values, source="the benchmark"), balancers=others)


def _figures(found: SimulationRecord) -> dict[str, Any]:
    """Reduce a simulation: what foreroute gains over each method, and each one's part of what forced balance gains."""
    plan, static = found["foreroute"], found["static"]
    return {
        "not_executed": list(plan.not_executed),
        "static_imbalance": round(static.imbalance, 3),
        "speedup_over": {one.name: round(one.training_s / plan.training_s, 4) for one in found.methods if one != plan},
        "share_of_forced_balance": {one.name: round(one.share_of_forced_balance, 4) for one in found.methods},
        "share_of_bound": round(plan.share_of_bound, 4),
        "forced_balance_speedup_over_static": round(static.training_s / found.forced_balance_s, 4),
    }


def _growth(found: SimulationRecord) -> dict[str, Any]:
    """Reduce the simulation of a cluster that grows."""
    plan = found["foreroute"]
    return {
        "not_executed": list(plan.not_executed),
        "groups": found.groups,
        "groups_simulated": found.groups_simulated,
        "speedup_over_static": round(plan.speedup_over_static, 4),
        "step_s": round(plan.step_s, 3),
        "planning_ms": round(plan.planning_s * 1e3, 1),
        "one_planner_over_recompute": round(plan.planning_s * found.groups / plan.phases.recompute, 4),
        "first_micro_step_ms": round(plan.planning_s / MICRO_STEPS * 1e3, 2),
    }
