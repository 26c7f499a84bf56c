"""Measures the parts, each in a process of its own, so that one that crashes or hangs costs the others nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10
"""A part looks at the time as it goes; one that goes on for so many seconds more is ended."""
LEAST_S = 5
"""A part that has less left is not begun."""
PARTS = {"machine": 20, "cost": 80, "mismatch": 45, "transfers": 35, "megatron": 25}
"""Modules of this package, and the seconds that they have on a GPU, in the order of their weight."""
ON_CPU_S = 300
"""What each has on a CPU, which may be busy."""


def run(parts: Sequence[str], device: str, ends_at: float) -> dict[str, Any]:
    """Measure these parts of `PARTS` until this second of the epoch.

    Report `parts`, each "passed", "failed: why" or "skipped: why", with their `metrics` and `seconds`, and whether they
    were at `full` sizes.
    """
    report: dict[str, Any] = {"device": device, "full": device.startswith("cuda")}
    report |= {"parts": {}, "metrics": {}, "seconds": {}}
    for name in parts:
        begun = time.monotonic()
        seconds = PARTS[name] if report["full"] else ON_CPU_S
        outcome, figures = _measured(name, device, min(seconds, ends_at - time.time()))
        report["parts"][name], report["metrics"][name] = outcome, figures
        report["seconds"][name] = round(time.monotonic() - begun, 1)
        print(f"{name:<10} {report['seconds'][name]:5.1f} s  {outcome}", file=sys.stderr, flush=True)
    return report


def _measured(name: str, device: str, seconds: float) -> tuple[str, dict[str, Any]]:
    """Its outcome, and all figures that it had found."""
    if seconds < LEAST_S:
        return "skipped: the time of the whole run was used up", {}
    command = [sys.executable, "-m", "benchmarks.gpu", name, "--device", device, "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds + GRACE_S, cwd=ROOT, check=False)
        printed, ended = done.stdout, _ending(done.returncode)
    except subprocess.TimeoutExpired as late:
        printed, ended = late.stdout or b"", f"failed: it was ended after {seconds + GRACE_S:.0f} s"
    # libraries print too, and a part that was ended has printed figures without an outcome
    lines = [line for line in printed.decode(errors="replace").splitlines() if line.startswith('{"outcome"')]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"outcome": "", "figures": {}}
    return found["outcome"] or ended, found["figures"]


def _ending(code: int) -> str:
    """Word the outcome of a part that did not say it."""
    return f"failed: it died of {signal.Signals(-code).name}" if code < 0 else f"failed: it ended with exit code {code}"
