"""What the cells measure, on a model that is trained in a second."""

import pytest

from experiments import training
from experiments.cells import Cell
from experiments.models import merged
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


def cell(kind, shifted=False, **settings):
    return Cell("T", kind, 3, "moe", settings, shifted)


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
