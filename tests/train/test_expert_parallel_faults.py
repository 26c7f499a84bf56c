"""What goes wrong between ranks: a step gets slower, or all of them end with one message. Never wrong, never hung."""

import errno
import os

import pytest

from foreroute.errors import RunFolderError
from foreroute.testing.ranks import Workers
from foreroute.train import load_checkpoint, train
from tests.ep.transfer.faults import Fault
from tests.train.broken_runs import (
    die_in_update,
    die_planning,
    diverge_once,
    faulty_steps,
    resume_apart,
    resume_broken,
    run_unlike,
)
from tests.train.expert_parallel_runs import path_of, resume, run, run_config
from tests.train.expert_parallel_steps import config_of
from tests.train.small_runs import records, small_config
from tests.train.test_expert_parallel import learned_alike

DEADLINE_S = 1.0


def test_late_and_damaged_replicas_leave_the_losses_as_they_are(workers, tmp_path):
    """A step with a damaged payload, one with a late transfer, and one without a fault."""
    what = "replicas of step 1, micro-step 0, routed layer 0"
    late = Fault("slow receiver", 1, what, given_up=tmp_path / "given-up")
    faults = [Fault("corrupt", 1, "replicas of step 0"), late, None]
    config = config_of(2, paths="direct", prefetch=0, slots="shared", checksums=True, deadline_s=DEADLINE_S)
    (steps, _), (_, happened) = workers(2).run(faulty_steps, config, faults)
    assert happened == [1, 1, 0]
    learned_alike(steps, config)
    damaged, delayed, undisturbed = (record["execution"] for record in steps.records)
    assert "arrived damaged" in " ".join(because(damaged).values())
    assert "had not arrived after 1.0 s" in because(delayed)["recompute", 0, 0]
    assert delayed["exposed_transfer_s"] >= DEADLINE_S
    for figures in (damaged, delayed, undisturbed):
        for name, m, layer in because(figures):
            stage = figures["stages"][name]
            assert stage["executed_MLG"][m][layer] == stage["at_home_MLG"][m][layer]
        as_planned = figures["max_over_mean"]["executed"] == figures["max_over_mean"]["planned"]
        assert as_planned == (not because(figures))


def because(figures):
    return {
        (name, *map(int, cell.split("."))): why
        for name, stage in figures["stages"].items()
        for cell, why in stage["fell_back"].items()
    }


def test_a_damaged_payload_that_nobody_verifies_is_seen_in_the_losses(workers):
    """A control: the fault is a fault."""
    faults = [Fault("corrupt", 1, "replicas of step 0")]
    config = config_of(2, paths="direct", prefetch=0, slots="shared")
    (steps, _), (_, happened) = workers(2).run(faulty_steps, config, faults)
    assert happened == [1]
    with pytest.raises(AssertionError):
        learned_alike(steps, config)


def test_what_goes_wrong_on_one_rank_ends_all_and_the_run_goes_on_later(workers, tmp_path):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    (memory / "something").write_text("")
    config = run_config(2, rl={"steps": 2}, checkpoint={"every": 1}, parallel={"shared_memory": str(memory)})
    workers(2).run(run, run_config(2, rl={"steps": 1}, checkpoint={"every": 1}), folder)
    for way, kinds, message in [
        ("full memory", ("TransferError",) * 2, f"of shared memory in {memory}: No space left on device"),
        ("plan of four", ("PlanError",) * 2, "the plan is for 4 ranks, and 2 are here; plan again for this world size"),
        ("no plan", ("MemoryError", "PlanError"), "no"),
        ("no later micro-step", ("MemoryError", "PlanError"), "no"),
        ("engine gone on rank 1", ("RankError", "EngineError"), "the engine is gone"),
        ("bug on rank 1", ("RankError", "KeyError"), "no such thing"),
        ("full disk", ("RunFolderError", "RankError"), "step-000002.safetensors cannot be written"),
    ]:
        outcomes = workers(2).outcomes(resume_broken, config, folder, way)
        assert tuple(outcome.kind for outcome in outcomes) == kinds, outcomes[0].trace
        assert all(message in outcome.message for outcome in outcomes)
        assert "\n" not in outcomes[0].message
        assert load_checkpoint(path_of(folder, 1))["step"] == 1
        assert [path.name for path in memory.iterdir()] == ["something"]
    assert workers(2).run(resume, config, folder) == [1, 0]
    assert [record["step"] for record in records(folder)] == [0, 1]


def test_ranks_end_together(workers, tmp_path):
    """When numbers of one of them are not finite."""
    config = run_config(2, rl={"steps": 3, "routing": "none"}, checkpoint={"every": 1})
    outcomes = workers(2).outcomes(diverge_once, config, tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["DivergedError"] * 2, outcomes[0].trace
    assert "the rollout of step 2 failed on another rank: rank 1: logits are not finite" in outcomes[0].message
    assert load_checkpoint(path_of(tmp_path / "run", 2))["step"] == 2


def test_ranks_that_were_started_unlike_say_so(workers, tmp_path):
    config = run_config(2, rl={"steps": 1})
    outcomes = workers(2).outcomes(run_unlike, config, tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["ConfigError"] * 2
    assert all("rank 1: rl.learning_rate is 1.0, 0.0006 on rank 0" in outcome.message for outcome in outcomes)
    assert not (tmp_path / "run").exists()
    here, there = tmp_path / "here", tmp_path / "there"
    workers(2).run(run, config, here)
    outcomes = workers(2).outcomes(resume_apart, config, here, there)
    assert [outcome.kind for outcome in outcomes] == ["ConfigError"] * 2
    assert all(
        "rank 1: the last checkpoint is None, 'step-000001.safetensors' on rank 0" in o.message for o in outcomes
    )
    assert not there.exists()
    taken = workers(2).outcomes(run, config, here)
    assert [outcome.kind for outcome in taken] == ["RunFolderError", "RankError"]
    assert {o.kind for o in workers(2).outcomes(run, run_config(4), tmp_path / "four")} == {"ConfigError"}
    odd = run_config(2, model={"sizes": {**config.model.sizes, "num_experts": 15}})
    uneven = workers(2).outcomes(run, odd, tmp_path / "odd")
    assert all("15 experts cannot be dealt to parallel.expert = 2 evenly" in outcome.message for outcome in uneven)


@pytest.mark.parametrize(
    ("dying", "survivor"), [(die_in_update, 0), pytest.param(die_planning, 1, marks=pytest.mark.slow)]
)
def test_a_killed_rank_ends_the_others_and_leaves_a_checkpoint(dying, survivor, tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    before = set(os.listdir("/dev/shm"))
    config = run_config(2, checkpoint={"every": 1}, parallel={"shared_memory": str(memory), "timeout_s": 60.0})
    group = Workers(2, timeout_s=60)
    try:
        outcomes = group.outcomes(dying, config, tmp_path / "run")
    finally:
        group.close()
    assert outcomes[1 - survivor] is None
    assert outcomes[survivor].kind == "TransferError", outcomes[survivor].trace
    assert "A process died" in outcomes[survivor].message
    assert load_checkpoint(path_of(tmp_path / "run", 1))["step"] == 1
    assert not list(memory.iterdir())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "foreroute" in name]


def test_what_cannot_be_written_is_one_error(tmp_path, monkeypatch):
    config = small_config(rl={"steps": 1})
    monkeypatch.setattr("os.fsync", _no_room)
    with pytest.raises(RunFolderError, match=r"config\.json cannot be written .*No space left.*make room"):
        train(config, tmp_path / "run")


def _no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
