"""What plans are worth on 64 GPUs, simulated: every method over ours, and ours over forced balance, in both stages.

8 nodes of 8 H100-class GPUs; Qwen3-30B-A3B and Qwen3-235B-A22B with expert parallelism over 8 to 64 of them; workloads
of `simulate.workload`, the same tokens for every method. **Every second is modelled.** Planning is measured here.

`metrics.<model>.EP<n>` is for 8k tokens of a GPU in a micro-step, deduplicated dispatch and ours with two slots,
stopping at 1.02 times the mean; under `by_tokens` the same for other sizes and for plain copies.
"""

from __future__ import annotations

from typing import Any

from benchmarks.balancers import OTHER_BALANCERS
from foreroute.simulate import SimulateConfig, SimulationRecord, parse_config, simulate

MODELS = {"qwen3-30b-a3b": "qwen3_30b_a3b", "qwen3-235b-a22b": "qwen3_235b_a22b"}
RANKS = (8, 16, 32, 64)
TOKENS = {"2k": 2048, "8k": 8192, "16k": 16_384}
DISPATCHERS = ("dedup", "copies")
METHODS = (
    "static",
    "eplb_previous",
    "eplb_step",
    "eplb_micro_step",
    "ours",
    "ours_exact",
    "ours_traffic",
)
SKEWS = (0.5, 1.0, 2.0, 4.0)
FEW = ("static", "eplb_micro_step", "ours", "ours_traffic")


def run(quick: bool) -> dict[str, Any]:
    """Figures by model and expert-parallel ranks; in `baselines` the seconds of every method."""
    metrics: dict[str, Any] = {}
    seconds: dict[str, Any] = {}
    for preset, name in MODELS.items():
        metrics[name], seconds[name] = {}, {}
        for ranks in RANKS:
            config = config_of(preset, ranks, "8k", "dedup", METHODS, quick)
            main = simulate(config, balancers={name: OTHER_BALANCERS[name] for name in ("relibra", "laer")})
            metrics[name][f"EP{ranks}"] = figures(main) | {
                "by_tokens": {
                    f"{tokens}_{dispatcher}": _short(simulate(config_of(preset, ranks, tokens, dispatcher, FEW, quick)))
                    for tokens in TOKENS
                    for dispatcher in DISPATCHERS
                },
                "by_skew": {str(skew): _skewed(preset, ranks, skew, quick) for skew in SKEWS},
                "exposed_share_2k_gradients_once": _gradients_once(preset, ranks, quick),
            }
            seconds[name][f"EP{ranks}"] = {record.name: round(record.training_s, 4) for record in main.methods}
    return {"metrics": metrics, "baselines": seconds}


def config_of(
    preset: str,
    ranks: int,
    tokens: str,
    dispatcher: str,
    methods: tuple[str, ...],
    quick: bool,
    *,
    skew: float = 1.0,
    execution: dict[str, str] | None = None,
) -> SimulateConfig:
    """64 GPUs."""
    size = {"micro_steps": 4, "layers": 1, "groups": 1} if quick else {"micro_steps": 16, "layers": 4, "groups": 2}
    values = {
        "cluster": {"gpus": 64, "expert_parallel": ranks},
        "model": {"preset": preset},
        "costs": {"dispatcher": dispatcher},
        "workload": {"tokens_per_rank": TOKENS[tokens], "skew": skew, **size},
        "execution": execution or {},
        "methods": methods,
    }
    return parse_config(values, source="the benchmark")


def figures(found: SimulationRecord) -> dict[str, Any]:
    """Of the main setting."""
    ours, static = found["ours"], found["static"]
    others = {
        f"speedup_over_{record.name}": round(record.training_s / ours.training_s, 4)
        for record in found.methods
        if record.name != "ours"
    }
    return {
        "static_imbalance": round(static.imbalance, 3),
        **others,
        "share_of_ideal": round(ours.share_of_forced_balance, 4),
        "share_of_ideal_exact": round(found["ours_exact"].share_of_forced_balance, 4),
        "share_of_bound": round(ours.share_of_bound, 4),
        "ideal_speedup_over_static": round(static.training_s / found.forced_balance_s, 4),
        "exposed_share": round(ours.exposed_share, 5),
        "exposed_share_eplb_micro_step": round(found["eplb_micro_step"].exposed_share, 5),
        "traffic_r8_over_balance_r2": round(ours.training_s / found["ours_traffic"].training_s, 4),
        "groups_waiting": round(ours.groups_waiting, 4),
        "parts_of_ours": _parts(found, "ours"),
        "parts_of_static": _parts(found, "static"),
        "stages_of_ours": {name: round(value, 4) for name, value in ours.stages._asdict().items()},
        "planning_ms": round(ours.planning_s * 1e3, 1),
    }


def _short(found: SimulationRecord) -> dict[str, float]:
    ours, static = found["ours"], found["static"]
    return {
        "static_imbalance": round(static.imbalance, 3),
        "speedup_over_static": round(ours.speedup_over_static, 4),
        "speedup_over_eplb_micro_step": round(found["eplb_micro_step"].training_s / ours.training_s, 4),
        "share_of_ideal": round(ours.share_of_forced_balance, 4),
        "traffic_share_of_ideal": round(found["ours_traffic"].share_of_forced_balance, 4),
        "ideal_speedup_over_static": round(static.training_s / found.forced_balance_s, 4),
        "exposed_share": round(ours.exposed_share, 5),
        "traffic_r8_over_balance_r2": round(ours.training_s / found["ours_traffic"].training_s, 4),
    }


def _skewed(preset: str, ranks: int, skew: float, quick: bool) -> dict[str, float]:
    """More and less even experts; 8k tokens, deduplicated."""
    found = simulate(config_of(preset, ranks, "8k", "dedup", ("static", "ours"), quick, skew=skew))
    return {
        "static_imbalance": round(found["static"].imbalance, 3),
        "speedup_over_static": round(found["ours"].speedup_over_static, 4),
        "share_of_ideal": round(found["ours"].share_of_forced_balance, 4),
    }


def _gradients_once(preset: str, ranks: int, quick: bool) -> float:
    """Exposed transfers at 2k tokens if gradients were added up in the slots, and returned once for each fetch."""
    execution = {"gradient_return": "transfer"}
    found = simulate(config_of(preset, ranks, "2k", "dedup", ("static", "ours"), quick, execution=execution))
    return round(found["ours"].exposed_share, 5)


def _parts(found: SimulationRecord, method: str) -> dict[str, float]:
    """Shares of recompute and update."""
    record = found[method]
    return {
        part: round((seconds + record.update_parts[part]) / record.training_s, 4)
        for part, seconds in record.recompute_parts.items()
    }
