"""A run that dies at any point of a step, and is taken up again, ends as if nothing had been."""

import json

import pytest

from foreroute.errors import RunFolderError
from foreroute.train import RunFolder, load_checkpoint, rollout, train
from foreroute.train.rollback import Rollback, read_rollbacks, roll_back, settle
from kill_points import Disk, Killed, on
from small_runs import always_informative, records, same_state, small_config


def tiny(checkpoint=None):
    return small_config(
        rl={"steps": 1},
        task={"min_operands": 2, "max_operands": 2},
        rollout={"prompts": 2, "group_size": 2},
        warm_start={"checkpoint": checkpoint} if checkpoint else {"max_steps": 1},
        measure={"compare_every": 100, "save_trace_every": 1},
        checkpoint={"every": 1},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not killed, its configuration, and how often it touched the disk."""
    folder, disk = tmp_path_factory.mktemp("whole"), Disk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "score", always_informative)
        first = train(tiny(), folder / "first")
        config = tiny(str(first.path / "checkpoints" / "step-000000.pt"))
        with on(disk):
            run = train(config, folder / "whole")
        yield run, config, disk.touches


def test_every_point_of_a_step_can_be_the_last(tmp_path, whole):
    run, config, touches = whole
    states = [load_checkpoint(path)["model"] for path in sorted((run.path / "checkpoints").iterdir())]
    assert not same_state(*states), "the step must have learned something"
    # folder, configuration, first checkpoint; trace, metrics, second checkpoint
    assert touches >= 12
    torn = begun_anew = 0
    for point in range(touches):
        folder = tmp_path / str(point)
        with pytest.raises(Killed), on(Disk(dies_at=point)):
            train(config, folder)
        metrics = folder / "metrics.jsonl"
        torn += metrics.exists() and not metrics.read_text().endswith("\n")
        if (folder / "config.json").exists():
            resumed = train(config, folder, resume=True)
        else:
            begun_anew += 1
            with pytest.raises(RunFolderError, match="holds no run to resume"):
                train(config, folder, resume=True)
            resumed = train(config, folder)
        assert records(resumed.path) == records(run.path), point
        assert same_state(load_checkpoint(resumed.last_checkpoint()), load_checkpoint(run.last_checkpoint())), point
    assert torn
    assert 1 <= begun_anew <= 4


def files(folder):
    """What is in a folder, but for temporary files."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def folder_of_a_run(path):
    """Steps 0 to 7, with checkpoints before steps 0, 2, 4 and 6."""
    for name, steps, suffix in (("checkpoints", (0, 2, 4, 6), "pt"), ("traces", range(8), "safetensors")):
        (path / name).mkdir(parents=True)
        for step in steps:
            (path / name / f"step-{step:06d}.{suffix}").write_text(f"{name} {step}")
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(8)))
    return RunFolder(path)


def test_every_point_of_a_rollback_can_be_the_last(tmp_path):
    rollback = Rollback(number=1, at_step=7, to_step=4, because="", skipped_steps=4)
    run, disk = folder_of_a_run(tmp_path / "whole"), Disk()
    before = files(run.path)
    with on(disk):
        roll_back(run, rollback)
    expected = files(run.path)
    assert set(expected) == {
        *(f"checkpoints/step-{step:06d}.pt" for step in (0, 2, 4)),
        *(f"traces/step-{step:06d}.safetensors" for step in range(4)),
        "rolled-back-1/checkpoints/step-000006.pt",
        *(f"rolled-back-1/traces/step-{step:06d}.safetensors" for step in range(4, 8)),
        "rolled-back-1/metrics.jsonl",
        "metrics.jsonl",
        "rollbacks.json",
    }
    assert disk.touches > 10
    ends = set()
    for point in range(disk.touches):
        run = folder_of_a_run(tmp_path / str(point))
        with pytest.raises(Killed), on(Disk(dies_at=point)):
            roll_back(run, rollback)
        settle(run)
        # it was decided, or it was not
        decided = bool(read_rollbacks(run))
        assert files(run.path) == (expected if decided else before), point
        ends.add(decided)
    assert ends == {True, False}
