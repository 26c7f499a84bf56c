"""A run that dies at any point, and is taken up again, ends as if nothing had been.

`python -m benchmarks kills` does it to real runs, with real kills.
"""

import json

import pytest

import foreroute as fr
from foreroute.capture import load_generation
from foreroute.errors import RunFolderError
from foreroute.records import Rollback
from foreroute.trace import digest
from foreroute.train import RunFolder, train
from foreroute.train.alarm_actions import finish_rollback, read_rollbacks, roll_back
from tests.train.counting_runs import counting, counting_config
from tests.train.kill_points import Disk, Killed, on

pytestmark = pytest.mark.slow

POISON = (5, 6, 7)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a rollback that was not killed, and how often it touched the disk."""
    folder = tmp_path_factory.mktemp("kills") / "whole"
    config, disk = counting_config(alarms={"action": "rollback"}), Disk(folder)
    with counting(POISON):
        with on(disk):
            run = train(config, folder)
        yield run, config, disk.touches


def test_any_point_of_a_run_can_be_the_last(tmp_path, whole):
    """Every one of the beginning and of the first steps, which have a trace, metrics and a checkpoint; then some."""
    run, config, touches = whole
    assert touches > 80
    torn = begun_anew = 0
    for point in [*range(20), *range(20, touches, 7)]:
        folder = tmp_path / str(point)
        with pytest.raises(Killed), on(Disk(folder, dies_at=point)):
            train(config, folder)
        metrics = folder / "metrics.jsonl"
        torn += metrics.exists() and not metrics.read_text().endswith("\n")
        if (folder / "config.json").exists():
            train(config, folder, resume=True)
        else:
            begun_anew += 1
            with pytest.raises(RunFolderError, match="holds no run to resume"):
                train(config, folder, resume=True)
            train(config, folder)
        assert files(folder) == files(run.path), point
    assert torn
    assert 1 <= begun_anew <= 5


def files(folder):
    """What is in a folder, but for temporary files; of traces, what they hold."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): content(path) for path in found}


def content(path):
    if path.parent.name == "rollouts" and ".trace" not in path.name:
        rollout = load_generation(path)
        return digest(rollout.trace), rollout.logprobs_R.tolist()
    if path.parent.name in ("rollouts", "traces") and path.stat().st_size > 100:
        # the order of a trace's metadata is not fixed
        return digest(fr.load(path))
    return path.read_bytes()


def folder_of_a_run(path):
    """Steps 0 to 7, with checkpoints before steps 0, 2, 4 and 6."""
    for name, steps, suffix in (("checkpoints", (0, 2, 4, 6), "safetensors"), ("traces", range(8), "safetensors")):
        (path / name).mkdir(parents=True)
        for step in steps:
            (path / name / f"step-{step:06d}.{suffix}").write_text(f"{name} {step}")
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(8)))
    return RunFolder(path)


def test_every_point_of_a_rollback_can_be_the_last(tmp_path):
    rollback = Rollback(number=1, at_step=7, to_step=4, because="", skipped_steps=4)
    run, disk = folder_of_a_run(tmp_path / "whole"), Disk(tmp_path)
    before = files(run.path)
    with on(disk):
        roll_back(run, rollback)
    expected = files(run.path)
    assert set(expected) == {
        *(f"checkpoints/step-{step:06d}.safetensors" for step in (0, 2, 4)),
        *(f"traces/step-{step:06d}.safetensors" for step in range(4)),
        "rolled-back-1/checkpoints/step-000006.safetensors",
        *(f"rolled-back-1/traces/step-{step:06d}.safetensors" for step in range(4, 8)),
        "rolled-back-1/metrics.jsonl",
        "metrics.jsonl",
        "rollbacks.json",
    }
    assert disk.touches > 10
    ends = set()
    for point in range(disk.touches):
        run = folder_of_a_run(tmp_path / str(point))
        with pytest.raises(Killed), on(Disk(tmp_path, dies_at=point)):
            roll_back(run, rollback)
        finish_rollback(run)
        # it was decided, or it was not
        decided = bool(read_rollbacks(run))
        assert files(run.path) == (expected if decided else before), point
        ends.add(decided)
    assert ends == {True, False}
