"""Worth of plans, simulated: every method over ours, and ours over forced balance, in both passes.

H100-class GPUs; Qwen3-30B-A3B and Qwen3-235B-A22B; workloads G8 to G64, the same tokens for every method.
**Every second is modelled.** Planning is measured here.

`metrics.<model>.one_node` is what an executor carries out: 8 GPUs, a row for every assignment. `metrics.<model>.EP<n>`
is not: 8 nodes of 8, expert parallelism over 8 to 64 GPUs, deduplicated dispatch; `not_executed` says what is missing.
Both are for 8k tokens of a GPU in a micro-step and ours with two slots, stopping at 1.02 times the mean; `by_tokens`
has other sizes, and on 64 GPUs plain copies too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.balancers import OTHER_BALANCERS
from foreroute.simulate import SimulationRecord, parse_config, simulate

MODELS = {"qwen3-30b-a3b": "qwen3_30b_a3b", "qwen3-235b-a22b": "qwen3_235b_a22b"}
RANKS = (8, 16, 32, 64)
TOKENS = {"2k": 2048, "8k": 8192, "16k": 16_384}
METHODS = ("static", "eplb_previous", "eplb_step", "eplb_micro_step", "ours", "ours_exact", "ours_traffic")
SKEWS = (0.5, 1.0, 2.0, 4.0)
DRAWN = {"micro_steps": 16, "layers": 4, "groups": 2}
FEW = ("static", "eplb_micro_step", "ours", "ours_traffic")


@dataclass(frozen=True)
class Scenario:
    """A cluster, and how much of the step is drawn."""

    preset: str
    gpus: int
    ranks: int
    dispatchers: tuple[str, ...]
    quick: bool

    def simulate(
        self, methods: tuple[str, ...], *, tokens: str = "8k", dispatcher: str | None = None, skew: float = 1.0
    ) -> SimulationRecord:
        """Simulate methods, with the first dispatcher by default; others' balancers stand beside all methods."""
        size = {"micro_steps": 4, "layers": 1, "groups": 1} if self.quick else DRAWN
        values = {
            "cluster": {"gpus": self.gpus, "expert_parallel": self.ranks},
            "model": {"preset": self.preset},
            "costs": {"dispatcher": dispatcher or self.dispatchers[0], "paths": "host"},
            "workload": {"preset": f"G{self.ranks}", "tokens_per_rank": TOKENS[tokens], "skew": skew, **size},
            "methods": methods,
        }
        others = {"laer": OTHER_BALANCERS["laer"]} if methods == METHODS else {}
        return simulate(parse_config(values, source="the benchmark"), balancers=others)


def run(quick: bool) -> dict[str, Any]:
    """Figures by model and cluster; in `baselines` the seconds of every method."""
    metrics: dict[str, Any] = {}
    seconds: dict[str, Any] = {}
    for preset, name in MODELS.items():
        one_node = Scenario(preset, 8, 8, ("copies",), quick)
        scenarios = {f"EP{ranks}": Scenario(preset, 64, ranks, ("dedup", "copies"), quick) for ranks in RANKS}
        metrics[name], seconds[name] = {}, {}
        for place, scenario in {"one_node": one_node, **scenarios}.items():
            main = scenario.simulate(METHODS)
            metrics[name][place] = figures(main) | {
                "by_tokens": {
                    f"{tokens}_{dispatcher}": _short(scenario.simulate(FEW, tokens=tokens, dispatcher=dispatcher))
                    for tokens in TOKENS
                    for dispatcher in scenario.dispatchers
                },
                "by_skew": {str(skew): _skewed(scenario.simulate(("static", "ours"), skew=skew)) for skew in SKEWS},
            }
            seconds[name][place] = {record.name: round(record.training_s, 4) for record in main.methods}
    return {"metrics": metrics, "baselines": seconds}


def figures(found: SimulationRecord) -> dict[str, Any]:
    """Reduce the main setting."""
    ours, static = found["ours"], found["static"]
    others = {
        f"speedup_over_{record.name}": round(record.training_s / ours.training_s, 4)
        for record in found.methods
        if record.name != "ours"
    }
    return {
        "not_executed": list(ours.not_executed),
        "static_imbalance": round(static.imbalance, 3),
        **others,
        "share_of_forced_balance": round(ours.share_of_forced_balance, 4),
        "share_of_forced_balance_exact": round(found["ours_exact"].share_of_forced_balance, 4),
        "share_of_bound": round(ours.share_of_bound, 4),
        "forced_balance_speedup_over_static": round(static.training_s / found.forced_balance_s, 4),
        "traffic_r8_over_balance_r2": round(ours.training_s / found["ours_traffic"].training_s, 4),
    }


def _short(found: SimulationRecord) -> dict[str, float]:
    ours, static = found["ours"], found["static"]
    return {
        "static_imbalance": round(static.imbalance, 3),
        "speedup_over_static": round(ours.speedup_over_static, 4),
        "speedup_over_eplb_micro_step": round(found["eplb_micro_step"].training_s / ours.training_s, 4),
        "share_of_forced_balance": round(ours.share_of_forced_balance, 4),
        "traffic_r8_over_balance_r2": round(ours.training_s / found["ours_traffic"].training_s, 4),
    }


def _skewed(found: SimulationRecord) -> dict[str, float]:
    """Reduce a simulation of more or less even experts."""
    return {
        "static_imbalance": round(found["static"].imbalance, 3),
        "speedup_over_static": round(found["ours"].speedup_over_static, 4),
        "share_of_forced_balance": round(found["ours"].share_of_forced_balance, 4),
    }
