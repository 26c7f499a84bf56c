"""What the cells measure, on a model that is trained in a second."""

import numpy as np
import pytest

from experiments import training
from experiments.cells import Cell
from experiments.models import configuration, merged
from experiments.starts import started
from experiments.static import run_static
from experiments.tampering import shifted
from experiments.training import run_training
from foreroute.errors import DivergedError
from foreroute.trace import RoutingTrace
from foreroute.train import run
from foreroute.train.policy import make_policy
from foreroute.train.prompts import make_task
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


def test_shifted_traces_hold_the_routes_of_the_token_before():
    config = configuration(small(), {}, 0)
    spec = make_policy(config, make_task(config)).spec
    rng = np.random.default_rng(0)
    lengths = [5, 1, 7]
    ids = [rng.permuted(np.tile(np.arange(16), (n - 1, 2, 1)), axis=2)[:, :, :2] for n in lengths]
    trace = RoutingTrace.from_sequences(spec, [np.arange(n) for n in lengths], ids, weight_version=4)
    off = shifted(trace)
    assert np.array_equal(off.token_ids_N, trace.token_ids_N)
    assert np.array_equal(off.valid_N, trace.valid_N)
    for s, routes in enumerate(ids):
        found = off.expert_ids_NLK[trace.offsets[s] : trace.offsets[s + 1] - 1]
        for position in range(len(routes)):
            assert np.array_equal(found[position], routes[position - 1])
