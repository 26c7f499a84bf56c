"""The runner: a result counts for the settings that made it."""

import json

import pytest

from experiments import cells
from experiments.cells import Cell
from experiments.models import base_values
from experiments.runner import current


def work(cell):
    digest = cell.settings_digest(base_values(cell.start))  # the other one loads torch
    return {"cell": cell.name, "digest": digest, "arm": cell.arm, "seed": 0, "processor_s": 0.0}


@pytest.mark.parametrize("is_early", [True, False])
def test_a_cell_whose_settings_changed_has_no_result(tmp_path, is_early):
    results = tmp_path / "results.jsonl"
    cell = Cell("T/0", "train", 0, "moe", {"rl": {"steps": 3}})
    line = work(cell)
    if not is_early:
        line |= {"digest": cell.digest(base_values("moe")), "trainer": cells.TRAINER_VERSION}
    results.write_text(json.dumps(line) + "\n")
    assert set(current([cell], results)) == {"T/0/0"}
    assert not current([Cell("T/0", "train", 0, "moe", {"rl": {"steps": 4}})], results)
    assert not current([Cell("T/0", "train", 0, "long", {"rl": {"steps": 3}})], results)
    assert not current([Cell("T/0", "train", 0, "moe", {"rl": {"steps": 3}}, shifted=True)], results)
