"""A run of RL, and its figures."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from experiments.cells import Cell
from experiments.models import configuration
from experiments.series import reduced
from experiments.tampering import shifting_engine
from foreroute.errors import DivergedError
from foreroute.train import RunFolder, train


def run_training(cell: Cell, base: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Run the configuration of the cell from a checkpoint.

    A run whose loss or probabilities stop being finite is a result too: it has collapsed at that step.
    """
    config = configuration({**base, "warm_start": {"checkpoint": str(checkpoint)}}, cell.settings, cell.seed)
    with tempfile.TemporaryDirectory(prefix="evidence-") as folder:
        run = Path(folder) / "run"
        diverged = False
        try:
            with shifting_engine() if cell.shifted else nullcontext():
                train(config, run)
        except DivergedError:
            diverged = True
        records = [record.to_json() for record in RunFolder(run).records()]
    trained_with = "replayed" if config.rl.routing == "R3" else "native"
    figures = reduced(records, trained_with)
    if diverged and figures["collapsed_at"] is None:
        # the step that diverged wrote no record
        figures["collapsed_at"] = len(records)
    return figures | {"diverged": diverged}
