"""Runs one part in this process: `python -m benchmarks.gpu bits --device cpu --seconds 60 --file bits.json`."""

from __future__ import annotations

import time

BEGUN = time.monotonic()  # importing torch is of the part's time

import argparse  # noqa: E402
import importlib  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from benchmarks.gpu.part import Part, Skipped  # noqa: E402


def main() -> None:
    """Run it, unless something that it needs cannot be imported."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    parser.add_argument("--full", action="store_true", help="at the sizes that the part is about")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument(
        "--needs", nargs="*", default=[], metavar="NAME", help="skip the part unless all can be imported"
    )
    given = parser.parse_args()
    device = torch.device(given.device)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for `deterministic`; cuBLAS reads it when it is first used
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # takes no device without a number
    else:
        torch.set_num_threads(1)
    part = Part(given.name, device, given.full, BEGUN + given.seconds, given.file)
    with part.check("run"):
        for needed in given.needs:
            _import(needed)
        importlib.import_module(f"benchmarks.gpu.{given.name}").run(part)
    if part.checks["run"] == "passed" and len(part.checks) > 1:  # its checks say more
        del part.checks["run"]
        part.save()


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"{name} cannot be imported: {error}") from None


if __name__ == "__main__":
    main()
