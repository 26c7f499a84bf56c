"""`foreroute demo-ep`: the demo's task on expert-parallel ranks, with R3 and a plan for every micro-step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from foreroute.cli.demo import demo_values
from foreroute.cli.train import train_and_report
from foreroute.train import parse_config


def run_demo_ep(folder: Path, *, steps: int) -> None:
    """Train once, on as many ranks as torchrun started, and write the report."""
    values: dict[str, Any] = demo_values()
    values["name"] = "R3-expert-parallel"
    values["rl"] |= {"steps": steps, "micro_step_tokens": 512}  # several micro-steps, as a large run has
    values["measure"] = {"compare_every": 5}
    values["parallel"] = {"expert": int(os.environ.get("WORLD_SIZE", "1"))}
    train_and_report(parse_config(values, source="the demo's configuration"), folder)
