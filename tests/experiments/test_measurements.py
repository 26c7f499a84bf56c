"""What the cells measure, on a model that is trained in a second, and which results count."""

import json

import pytest

from experiments import cells, training
from experiments.cells import Cell
from experiments.models import base_values, merged
from experiments.runner import current
from experiments.starts import started
from experiments.static import run_static
from experiments.training import run_training
from foreroute.errors import DivergedError
from foreroute.train import run
from tests.train.small_runs import small_values

DOOR = run.make_engine


def small(**sections):
    return merged(small_values(), {"rollout": {"precision": "fp8"}, "measure": {"compare_every": 1}, **sections})


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return started(tmp_path_factory.mktemp("starts"), "moe", small(), 3)


def cell(experiment, shifted=False, **settings):
    return Cell("T", experiment, 3, "moe", settings, shifted)


def test_at_fixed_weights_replay_lowers_what_precision_raised(start):
    coarse = run_static(cell("static"), small(), start)
    assert coarse["none"]["differing_share"] > 0
    assert coarse["R3"]["differing_share"] == 0
    assert coarse["R3"]["k3"] < coarse["none"]["k3"] < coarse["shifted"]["k3"]
    exact = run_static(cell("static", rollout={"precision": "float32"}), small(), start)
    assert max(exact[how]["k3"] for how in ("none", "R3")) < 1e-9
    assert exact["shifted"]["k3"] > 1e-6, "the control is seen to fail"


@pytest.mark.slow
def test_shifted_routes_reach_the_trainer_and_diverged_runs_are_results(start, monkeypatch):
    rl = {"routing": "R3", "steps": 1}
    right, wrong = (run_training(cell("train", off, rl=rl), small(), start) for off in (False, True))
    assert wrong["mean"]["k3"] > 2 * right["mean"]["k3"]
    assert 0 < right["stale_share_by_mini_step"][0] < wrong["stale_share_by_mini_step"][0]
    assert run.make_engine is DOOR

    def diverging(config, folder):
        run.train(config, folder)
        raise DivergedError("loss nan")

    monkeypatch.setattr(training, "train", diverging)
    found = run_training(cell("train", rl=rl), small(), start)
    assert (found["diverged"], found["collapsed_at"]) == (True, 1)


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
