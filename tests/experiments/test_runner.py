"""The runner: a cell that is finished never runs again, whatever happened meanwhile."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from experiments import cells
from experiments.cells import Cell
from experiments.models import base_values
from experiments.runner import GridError, current, finished, run_cells
from foreroute.testing.ranks import environment
from tests.experiments import cell_worker


def ran(folder):
    return Counter(line.split()[0] for line in (folder / "ran").read_text().splitlines())


def wait_for(there):
    deadline = time.monotonic() + 240
    while not there():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_runner_goes_on_where_it_was(tmp_path):
    results = tmp_path / "results.jsonl"
    runner = subprocess.Popen([sys.executable, "-m", cell_worker.__name__, str(tmp_path)], env=environment())
    wait_for(lambda: (tmp_path / "stuck").exists() and len(finished(results)) == 5)
    with pytest.raises(GridError, match="another runner"):
        run_cells(cell_worker.cells(6), results, tmp_path, processes=1, work=cell_worker.work)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    process = int((tmp_path / "stuck").read_text())
    wait_for(lambda: not Path(f"/proc/{process}/exe").exists())

    whole = results.read_text()
    results.write_text(whole + whole[:30])  # a line that was being written
    wanted = [*cell_worker.cells(6), Cell("T/bad", "train", 0, "moe"), Cell("T/7", "train", 0, "moe")]
    said = []
    with pytest.raises(GridError, match=r"1 .*T/bad/0"):
        run_cells(wanted, results, tmp_path, processes=2, say=said.append, work=cell_worker.work)
    assert said[0] == "5 of 8 cells have a result, 3 to run"
    assert any("T/bad/0 failed: ValueError: no such thing" in line for line in said)
    assert ran(tmp_path) == {cell.name: 1 for cell in wanted}
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert Counter(line["cell"] for line in lines) == {cell.name: 1 for cell in wanted if cell.arm != "T/bad"}
    assert run_cells(cell_worker.cells(6), results, tmp_path, processes=2, work=cell_worker.work) == 0
    with pytest.raises(GridError, match="was killed"):
        run_cells([Cell("T/killed", "train", 0, "moe")], results, tmp_path, processes=1, work=cell_worker.work)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_cell_whose_settings_changed_has_no_result(tmp_path, is_early):
    results = tmp_path / "results.jsonl"
    cell = Cell("T/0", "train", 0, "moe", {"rl": {"steps": 3}})
    line = cell_worker.work(cell, tmp_path)
    if not is_early:
        line |= {"digest": cell.digest(base_values("moe")), "trainer": cells.TRAINER_VERSION}
    results.write_text(json.dumps(line) + "\n")
    assert set(current([cell], results)) == {"T/0/0"}
    assert not current([Cell("T/0", "train", 0, "moe", {"rl": {"steps": 4}})], results)
    assert not current([Cell("T/0", "train", 0, "long", {"rl": {"steps": 3}})], results)
    assert not current([Cell("T/0", "train", 0, "moe", {"rl": {"steps": 3}}, shifted=True)], results)
