"""Runs on several ranks: that they resume, on as many ranks or others, and end together."""

import os

import pytest

import foreroute as fr
from foreroute.errors import ConfigError
from foreroute.train import load_checkpoint, train
from processes import Workers
from small_runs import records
from spread_runs import die_in_update, fail_in_rollout, restored_state, resume, run, run_config, stop_early
from test_run import same_state


def test_an_interrupted_run_on_two_ranks_ends_as_the_uninterrupted_one(workers, tmp_path):
    config = run_config(2)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert workers(2).run(run, config, whole) == [3, 0]
    # rank 0 alone is asked to stop, and rank 1 stops with it
    assert workers(2).run(stop_early, config, stopped) == [1, 0]
    assert workers(2).run(resume, config, stopped) == [2, 0]
    assert learned(stopped) == learned(whole)
    assert same_state(checkpoint(stopped, 3), checkpoint(whole, 3))
    trace = fr.load(whole / "traces" / "step-000002.safetensors")
    assert len(trace) == 8 * 4, "the trace holds the rollouts of all ranks"


def test_a_run_goes_on_with_other_numbers_of_ranks(workers, tmp_path):
    folder = tmp_path / "run"
    workers(2).run(run, run_config(2, rl={"steps": 1}), folder)
    train(run_config(1, rl={"steps": 2}), folder, resume=True)
    assert [record.get("execution", {}).get("ranks", 1) for record in records(folder)] == [2, 1]
    saved = checkpoint(folder, 2)
    for num_ranks in (2, 4):
        restored = workers(num_ranks).run(restored_state, run_config(num_ranks), path_of(folder, 2))
        assert all(same_state(state, saved) for state in restored)
    workers(4).run(resume, run_config(4, rl={"steps": 3}), folder)
    assert [record.get("execution", {}).get("ranks", 1) for record in records(folder)] == [2, 1, 4]
    assert not same_state(checkpoint(folder, 3)["model"], saved["model"])


def test_what_goes_wrong_on_one_rank_ends_all(workers, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "something").write_text("")
    first, second = workers(2).outcomes(run, run_config(2), taken)
    assert (first.kind, second.kind) == ("RunFolderError", "RankError")
    assert "rank 0" in second.message
    assert first.message in second.message
    first, second = workers(2).outcomes(fail_in_rollout, run_config(2), tmp_path / "run")
    assert (first.kind, second.kind) == ("RankError", "EngineError")
    assert first.message == "the rollout of step 0 failed on another rank: rank 1: the engine is gone"
    assert {outcome.kind for outcome in workers(2).outcomes(run, run_config(4), tmp_path / "four")} == {"ConfigError"}


def test_one_process_is_not_two(tmp_path):
    with pytest.raises(ConfigError, match=r"parallel\.expert is 2 and 1 process runs; start .* --nproc-per-node 2"):
        train(run_config(2), tmp_path / "run")


def test_a_killed_rank_ends_the_others_and_leaves_a_checkpoint(tmp_path):
    before = set(os.listdir("/dev/shm"))
    group = Workers(2, timeout_s=60)
    first, second = group.outcomes(die_in_update, run_config(2, checkpoint={"every": 1}), tmp_path / "run")
    group.close()
    assert second is None
    assert first.kind == "TransferError", first.trace
    assert "A process died" in first.message
    assert checkpoint(tmp_path / "run", 1)["step"] == 1
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "foreroute" in name]


def path_of(folder, step):
    return folder / "checkpoints" / f"step-{step:06d}.pt"


def checkpoint(folder, step):
    return load_checkpoint(path_of(folder, step))


def learned(folder):
    """Records without the seconds in them."""
    timed = ("exposed_transfer_s", "planning_s", "exposed_planning_s")
    found = records(folder)
    for record in found:
        for key in timed:
            del record["execution"][key]
    return found
