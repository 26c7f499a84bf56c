"""Work that takes no time, for runners in processes of their own. No torch."""

import os
import sys
import time
from pathlib import Path

from experiments.cells import Cell
from experiments.models import base_values
from experiments.runner import run_cells


def cells(count):
    return [Cell(f"T/{number}", "train", 0, "moe") for number in range(count)]


def work(cell, starts):
    """Leave a mark for every time that a cell runs."""
    with open(starts / "ran", "a", encoding="utf-8") as file:
        file.write(f"{cell.name} {os.getpid()}\n")
    if cell.arm == "T/killed":
        os._exit(9)
    if cell.arm == "T/bad":
        raise ValueError("no such thing")
    digest = cell.settings_digest(base_values(cell.start))  # the other one loads torch
    return {"cell": cell.name, "digest": digest, "arm": cell.arm, "seed": 0, "processor_s": 0.0}


def stuck(cell, starts):
    """As `work`, but the third cell never ends."""
    if cell.arm == "T/2":
        (starts / "stuck").write_text(str(os.getpid()))
        time.sleep(600)
    return work(cell, starts)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_cells(cells(6), folder / "results.jsonl", folder, processes=2, work=stuck)
