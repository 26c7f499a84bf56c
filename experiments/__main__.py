"""Runs the grid, or draws its page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from experiments.grid import grid
from experiments.runner import GridError, current, run_cells

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
PAGE = HERE.parent / "docs" / "evidence.md"


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the cells that have no result")
    run.add_argument("--only", default="", metavar="PREFIX", help="cells whose name begins with this, such as B/R3")
    run.add_argument("--processes", type=int, default=2)
    run.add_argument(
        "--starts", type=Path, default=Path("runs/starts"), help="where checkpoints to start from are kept"
    )
    run.add_argument("--results", type=Path, default=RESULTS, help="another file runs all that has no result in it")
    commands.add_parser("page", help="redraw docs/evidence.md and experiments/results.md from the results")
    commands.add_parser("list", help="print which cells have a result")
    arguments = parser.parse_args()
    cells = grid()
    if arguments.command == "run":
        chosen = [cell for cell in cells if cell.name.startswith(arguments.only)]
        if not chosen:
            sys.exit(f"no cell begins with {arguments.only}; python -m experiments list names them")
        try:
            run_cells(chosen, arguments.results, arguments.starts, processes=arguments.processes, say=_say)
        except GridError as error:
            sys.exit(str(error))
    elif arguments.command == "page":
        from experiments.page import write_page  # draws, and loads matplotlib

        write_page(cells, RESULTS, PAGE)
    else:
        done = current(cells, RESULTS)
        for cell in cells:
            _say(f"{'done' if cell.name in done else 'open'} {cell.name}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
