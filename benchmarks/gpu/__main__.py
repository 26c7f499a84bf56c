"""Measures one part in this process: `python -m benchmarks.gpu cost --device cpu --seconds 60`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback

import torch

from benchmarks.gpu.figures import Figures


def main() -> None:
    """Measure it. Its last line has all figures, and the outcome: "passed", "failed: why" or "skipped: why"."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # takes no device without a number
    else:
        torch.set_num_threads(1)
    figures = Figures(device, time.monotonic() + given.seconds)
    try:
        importlib.import_module(f"benchmarks.gpu.{given.name}").run(figures)
    except ModuleNotFoundError as error:
        figures.show(f"skipped: {error}")
    except Exception as error:  # whatever a broken part raises is its outcome
        traceback.print_exc()
        figures.show(f"failed: {type(error).__name__}: {str(error).strip()[:500]}")
        sys.exit(1)
    else:
        figures.show("passed")


if __name__ == "__main__":
    main()
