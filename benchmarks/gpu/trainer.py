"""The reference trainer on the device: seconds and memory of the demo's task for a few steps, with R3 and without.

step_s                       seconds of a step with R3, all phases; median, the first step left out
rollout_s, recompute_s, measure_s, update_s        the phases of it
step_none_s                  without replay
native_k3, replayed_k3       trainer against engine on the trainer's own routes, and on the rollout's
peak_memory_gb               of tensors on the device in a step; CUDA alone
reward_first, reward_last    of the first and the last step with R3; so few steps teach nothing
"""

from __future__ import annotations

import statistics
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import Figures
from foreroute.train import parse_config, train

PHASES = ("rollout", "recompute", "measure", "update")
STEPS = 4
RESERVE_S = 8
"""Training without replay is not begun with less left: a few steps of a model that is bound by launches."""


def run(figures: Figures) -> None:
    """Train with R3, then without replay."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = train(_config(figures, "R3", STEPS), folder / "R3").records()
        k3 = {side: [record["mismatch"][side]["k3"] for record in records] for side in ("native", "replayed")}
        figures.record(
            step_s=_median(records, tuple(records[-1]["seconds"])),
            **{f"{phase}_s": _median(records, (phase,)) for phase in PHASES},
            native_k3=statistics.fmean(k3["native"]),
            replayed_k3=statistics.fmean(k3["replayed"]),
            reward_first=records[0]["reward_mean"],
            reward_last=records[-1]["reward_mean"],
            ran_on=records[0]["device"]["name"],
        )
        if figures.device.type == "cuda":
            figures.record(peak_memory_gb=max(record["device"]["peak_memory_bytes"] for record in records) / 1e9)
        if figures.full and figures.seconds_left < RESERVE_S:
            return
        warm = {"checkpoint": str(folder / "R3" / "checkpoints" / "step-000000.safetensors")}
        records = train(_config(figures, "none", STEPS - 1, warm), folder / "none").records()
        figures.record(step_none_s=_median(records, tuple(records[-1]["seconds"])))


def _config(figures: Figures, routing: str, steps: int, warm: dict[str, Any] | None = None) -> Any:
    """The demo's, with less of a warm start, and smaller on a CPU."""
    text = (files("foreroute.cli") / "arithmetic.toml").read_text(encoding="utf-8")
    values = tomllib.loads(text) | {"name": routing, "device": figures.device.type}
    values["rollout"] |= {"prompts": 32 if figures.full else 4, "group_size": 8}
    values["rl"] |= {"routing": routing, "steps": steps}
    values["checkpoint"] = {"every": 2, "keep": 99}
    values["measure"] = {"save_trace_every": 2}
    few = {"max_steps": 150 if figures.full else 20, "batch_size": 128 if figures.full else 32}
    values["warm_start"] = warm or few
    if not figures.full:
        values["model"]["sizes"] |= {"num_hidden_layers": 2, "num_experts": 16}
    return parse_config(values, source="the demo's configuration")


def _median(records: Sequence[dict[str, Any]], sum_of: Sequence[str]) -> float:
    """Take the median of all steps but the first, which compiles and allocates."""
    later = [sum(record["seconds"].get(phase, 0.0) for phase in sum_of) for record in records[1:]]
    return float(statistics.median(later))
