"""Planning from 64 to 4,096 GPUs: its time, measured here on one thread, in steps whose time is simulated.

Two ways to grow. More groups at the same expert parallelism: every group plans its own step (`planning_ms`), or one
planner plans for all (`one_planner_over_recompute`). Larger groups: a model of 256 experts over 16 to 256 ranks, whose
cells take longer to plan. `first_micro_step_ms` is what is exposed of a plan that begins with the recompute and is
handed over micro-step by micro-step, which no executor does (decision 0010: a plan is whole when its step begins).
Tokens of a GPU stay the same, 8k in a micro-step, as uneven as G16, G64 and, for 256 experts, E256. `not_executed` says
what else is missing.
"""

from __future__ import annotations

from typing import Any

from foreroute.simulate import SimulationRecord, parse_config, simulate

GPUS = (64, 256, 1024, 4096)
LARGE_GROUPS = (16, 64, 128, 256)
TOKENS, MICRO_STEPS = 8192, 16


def run(quick: bool) -> dict[str, Any]:
    """Figures by GPUs, and by ranks of a group."""
    layers, groups = (1, 2) if quick else (2, 64)
    by_gpus = {
        str(gpus): figures(_simulated("qwen3-30b-a3b", gpus, 64, layers, min(groups, gpus // 64))) for gpus in GPUS
    }
    by_ranks = {
        str(ranks): figures(_simulated("deepseek-v3", 256, ranks, 1, 1))
        for ranks in (LARGE_GROUPS[:2] if quick else LARGE_GROUPS)
    }
    return {"metrics": {"by_gpus": by_gpus, "by_ranks_of_a_group": by_ranks}, "baselines": {}}


def figures(found: SimulationRecord) -> dict[str, Any]:
    """Reduce the simulation of one cluster."""
    ours = found["ours"]
    planning_s = ours.planning_s
    return {
        "not_executed": list(ours.not_executed),
        "groups": found.groups,
        "groups_simulated": found.groups_simulated,
        "speedup_over_static": round(ours.speedup_over_static, 4),
        "step_s": round(ours.step_s, 3),
        "planning_ms": round(planning_s * 1e3, 1),
        "one_planner_over_recompute": round(planning_s * found.groups / ours.phases.recompute, 4),
        "first_micro_step_ms": round(planning_s / MICRO_STEPS * 1e3, 2),
    }


def _simulated(model: str, gpus: int, ranks: int, layers: int, groups: int) -> SimulationRecord:
    preset = "G16" if ranks == 16 else "E256" if model == "deepseek-v3" else "G64"
    size = {"tokens_per_rank": TOKENS, "micro_steps": MICRO_STEPS, "layers": layers, "groups": groups}
    values = {
        "cluster": {"gpus": gpus, "expert_parallel": ranks},
        "model": {"preset": model},
        "costs": {"dispatcher": "dedup", "paths": "host"},
        "workload": {"preset": preset, **size},
        "methods": ["static", "ours"],
    }
    return simulate(parse_config(values, source="the benchmark"))
