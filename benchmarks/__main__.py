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
    """Run the case that the command line names, or all, and print one report of each as the last line of its output."""
    # A file is a case; folders hold parts of cases and what they share, but for `gpu`, which is a case of many parts.
    cases = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.ispkg and m.name != "__main__")
    arguments = _parser(cases).parse_args()
    if arguments.name == "all":
        flags = [f"--{flag}" for flag in ("json", "quick") if getattr(arguments, flag)]
        for name in cases:  # each in a process of its own, which it may set up as it likes
            subprocess.run([sys.executable, "-m", "benchmarks", name, *flags], check=True)
        return
    if arguments.name == "gpu":
        result = runner.run(arguments.parts, arguments.device, arguments.ends_at)
    else:
        some = {"parts": arguments.parts} if getattr(arguments, "parts", None) else {}
        result = importlib.import_module(f"benchmarks.{arguments.name}").run(quick=arguments.quick, **some)
    report: dict[str, Any] = {"case": arguments.name, **result, "env": environment()}
    print(json.dumps(report, indent=None if arguments.json else 2), flush=True)
    sys.exit(any(outcome.startswith("failed") for outcome in report.get("parts", {}).values()))


def _parser(cases: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="NAME", required=True, help=", ".join([*cases, "gpu", "all"]))
    printing = argparse.ArgumentParser(add_help=False)
    printing.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    for name in (*cases, "all"):
        command = commands.add_parser(name, parents=[printing])
        command.add_argument("--quick", action="store_true", help="end within 50 s on two cores")
        if name == "execution":
            what = "counts, all_to_all, seconds, recorded (default: all, ten minutes)"
            command.add_argument("--parts", nargs="+", metavar="PART", help=what)
    gpu = commands.add_parser("gpu", parents=[printing])  # all leaves it out
    gpu.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    gpu.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu at small sizes (default: cuda)")
    gpu.add_argument("--ends-at", type=float, default=math.inf, help="the second of the epoch at which it all ends")
    return parser


def environment() -> dict[str, str]:
    """List what the figures depend on."""
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
