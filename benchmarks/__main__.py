"""Runs one benchmark and prints its result: `python -m benchmarks replay --json --quick`."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pkgutil
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import benchmarks
from benchmarks.gpu import runner
from benchmarks.gpu.runner import PARTS

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Parse the command line and run the case, or all; with --json one JSON object as the last line of each."""
    # A file is a case; folders hold parts of cases and what they share, but for `gpu`, which is a case of many parts.
    cases = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.ispkg and m.name != "__main__")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*cases, "gpu", "all"])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="end within 50 s on two cores")
    of_gpu = parser.add_argument_group("of gpu, which all leaves out")
    of_gpu.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    of_gpu.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu at small sizes (default: cuda)")
    of_gpu.add_argument("--ends-at", type=float, default=math.inf, help="the second of the epoch at which it all ends")
    arguments = parser.parse_args()
    if arguments.name == "gpu":
        measured = runner.run(arguments.parts, arguments.device, arguments.ends_at)
        report = {"case": "gpu", **measured, "env": environment()}
        print(json.dumps(report) if arguments.json else json.dumps(report, indent=2), flush=True)
        sys.exit(any(outcome.startswith("failed") for outcome in report["parts"].values()))
    if arguments.name == "all":
        flags = [f"--{flag}" for flag in ("json", "quick") if getattr(arguments, flag)]
        for name in cases:  # each in a process of its own, which it may set up as it likes
            subprocess.run([sys.executable, "-m", "benchmarks", name, *flags], check=True)
        return
    case = importlib.import_module(f"benchmarks.{arguments.name}")
    result: dict[str, Any] = case.run(quick=arguments.quick)
    report = {"case": arguments.name, **result, "env": environment()}
    print(json.dumps(report) if arguments.json else json.dumps(report, indent=2), flush=True)


def environment() -> dict[str, str]:
    """What the figures depend on."""
    packages = {}
    for name in ("foreroute", "numpy", "numba", "torch", "transformers", "megatron-core", "trl", "zstandard"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        **packages,
    }


if __name__ == "__main__":
    main()
