"""The pipeline of examples/pipeline: exported weights, the same losses on other ranks, and a canary that sees."""

import json
import re
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters.megatron.forked_ranks import run

CLOSE = 1e-9
STEPS, BY_NIGHT = 2, 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """By steps, the run of four ranks, with rollouts of an engine that is fed what they export after every step."""

    @cache
    def of(steps):
        folder = tmp_path_factory.mktemp("pipeline") / "four"
        require_trained(folder, None, (2,), steps, ranks=4)
        return folder

    return of


def begun(folder, tmp_path):
    """A folder of a run that begins with the policy of this one, which takes a second to make."""
    shutil.copytree(folder / "initial", tmp_path / "run" / "initial")
    return tmp_path / "run"


def require_trained(folder, rollouts, split, steps, ranks):
    given = str(folder), rollouts and str(rollouts), split, steps
    assert set(run("pipeline_checks.trains", *given, ranks=ranks, timeout=600)) == {(0, "")}


def test_the_engine_has_the_weights_and_experts_compute_what_was_planned(four):
    found = metrics(four(STEPS))
    for step in found:
        assert step["disagreement"] == 0, step
        assert step["k3"] < 1e-9, step
        assert step["canary_nats"] < 1e-4, step
        assert step["canary_experts"] == 1, step
        assert step["executed"] == step["planned"], step
    assert max(abs(step["loss_1"]) for step in found) > 1e-3, "losses that are zero are the same anywhere"


@pytest.mark.parametrize(
    ("ranks", "split"), [(1, ()), (4, (1, 1, 2)), (4, (2, 2)), (4, ())], ids=["one", "ep2-edp2", "ep2-tp2-pp2", "ep4"]
)
@pytest.mark.exhaustive
def test_ranks_in_other_splits_have_the_same_losses_on_the_same_rollouts(four, tmp_path, ranks, split):
    folder = four(BY_NIGHT)
    require_trained(tmp_path, folder / "rollouts", split, BY_NIGHT, ranks)
    of_four, of_others = metrics(folder), metrics(tmp_path)
    assert len(of_four) == len(of_others) == BY_NIGHT
    for step, (a, b) in enumerate(zip(of_four, of_others, strict=True)):
        for name in ("loss_0", "loss_1", "k3"):
            assert abs(a[name] - b[name]) <= CLOSE, (step, name, a, b)
        assert b["disagreement"] == 0, step
    for of_run in (of_four, *[of_others] * (ranks > 1)):
        assert all(step["executed"] == step["planned"] for step in of_run)
        assert sum(step["moved_bytes"] for step in of_run) > 0
        assert sum(step["slowest_rank_at_homes"] for step in of_run) > sum(step["executed"] for step in of_run)
    first, *trained = (
        load_file(f / "model.safetensors") for f in (folder / "initial", folder / "trained", tmp_path / "trained")
    )
    for name, weight in first.items():
        assert torch.allclose(trained[0][name], trained[1][name], rtol=0, atol=CLOSE), name
        assert not torch.equal(trained[0][name], weight.double()), f"{name} was not trained"


@pytest.mark.parametrize("dying", [3, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_dead_rank_ends_the_run_with_one_message_and_it_goes_on_as_if_nothing_had_been(four, tmp_path, dying):
    """On the same ranks: bit for bit, with experts away from home in the checkpoint."""
    folder = four(STEPS)
    rollouts, dead = str(folder / "rollouts"), begun(folder, tmp_path)
    ended = run("pipeline_checks.dies", str(dead), rollouts, (2,), STEPS, dying, ranks=4, timeout=600, dying={dying})
    assert ended.pop(dying) is None
    assert [code for code, _ in ended] == [1, 1, 1]
    said = "".join(printed for _, printed in ended)
    assert re.fullmatch(
        r"the run ends: rank \d lost another rank, or failed itself (.*); the same command .*\n", said
    ), said
    assert len(metrics(dead)) == 1
    require_trained(dead, rollouts, (2,), STEPS, ranks=4)
    canary = ("canary_nats", "canary_experts")
    assert metrics(dead) == [{n: v for n, v in step.items() if n not in canary} for step in metrics(folder)]
    of_four, of_this = (load_file(f / "trained" / "model.safetensors") for f in (folder, dead))
    assert all(torch.equal(of_four[name], weight) for name, weight in of_this.items())


def test_the_canary_ends_a_run_whose_engine_lacks_one_experts_weights(four, tmp_path):
    folder = str(begun(four(STEPS), tmp_path))
    ended = run("pipeline_checks.trains", folder, None, (), 3, "LosingEngine", ranks=2, timeout=600)
    assert [code for code, _ in ended] == [1, 1]
    assert re.fullmatch(
        r"the run ends: EngineError: engine and trainer are \S+ nats apart at a token of the canary, after the sync of "
        r"version 1; (.|\n)*",
        ended[0][1],
    ), ended[0][1]
    assert ended[1][1] == ""


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
