"""A run folder with something damaged, missing, foreign or in use: one error that names it, and nothing is lost."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foreroute.capture import load_generation
from foreroute.errors import ConfigError, RunFolderError
from foreroute.files import writing
from foreroute.trace import load
from foreroute.train import RunFolder, Watcher, train
from foreroute.train.checkpoint import read_checkpoint, write_checkpoint
from foreroute.train.metrics_file import MetricsFile
from tests.train.counting_runs import counting, counting_config
from tests.train.small_runs import records


def config_of(steps=9, **sections):
    config = counting_config(**sections)
    return config.model_copy(update={"rl": config.rl.model_copy(update={"steps": steps})})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of nine steps, with checkpoints of steps 0, 2, 4, 6, 8 and 9."""
    with counting():
        yield train(config_of(), tmp_path_factory.mktemp("damaged") / "whole")


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole.path, tmp_path / "run")
    return tmp_path / "run"


def without_checkpoints_after(folder, step):
    for path in (folder / "checkpoints").iterdir():
        if int(path.stem[5:]) > step:
            path.unlink()


def edited(name, change):
    def damage(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def lines(change):
    """A change of the list of lines."""
    return edited("metrics.jsonl", lambda content: b"".join(change(content.splitlines(keepends=True))))


def line(number, change):
    def changed(old):
        old[number] = change(old[number].rstrip(b"\n")) + b"\n"
        return old

    return lines(changed)


def values(name, change):
    """A change of what a JSON file holds."""

    def changed(content):
        stored = json.loads(content)
        change(stored)
        return json.dumps(stored).encode()

    return edited(name, changed)


def replaced_by_a_folder(name):
    def damage(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def removed(name):
    def damage(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


DAMAGES = {
    "a line that is no JSON": (line(3, lambda text: text[:20]), r"metrics\.jsonl, line 4 is damaged: it is not JSON"),
    "a line that is no object": (line(3, lambda text: b"[1]"), r"line 4 is damaged: it is \[1\]; expected an object"),
    "a line that is not UTF-8": (line(3, lambda text: b"\xff" + text), "line 4 is damaged: it is not text in UTF-8"),
    "a line nested deep": (line(3, lambda text: b"[" * 100_000), "line 4 is damaged: it is not JSON that can be read"),
    "a line nested just so deep": (
        line(8, lambda text: text[:-1] + b', "x": ' + b"[" * 800 + b"]" * 800 + b"}"),
        "line 9 is damaged: it has the unknown keys x",
    ),
    "a line with another figure": (line(3, lambda text: text.replace(b"0.5", b"0.6")), "are not those that were there"),
    "a line without alarms": (
        line(8, lambda text: text.replace(b"alarms", b"harmless")),
        "line 9 is damaged: it has the unknown keys harmless",
    ),
    "zeros after a power cut": (edited("metrics.jsonl", lambda content: bytes(len(content))), "records of 0 steps"),
    "zeros in a line": (line(8, lambda text: bytes(len(text))), "line 9 is damaged"),
    "a line missing": (lines(lambda old: old[:3] + old[4:]), "line 4 is damaged: its step is 4, expected 3"),
    "a line doubled": (lines(lambda old: old[:4] + old[3:]), "line 5 is damaged: its step is 3, expected 4"),
    "lines cut off": (lines(lambda old: old[:5]), "records of 5 steps, and the last checkpoint is of step 9"),
    "the last line cut off": (lines(lambda old: old[:8]), "records of 8 steps, and the last checkpoint is of step 9"),
    "metrics gone": (removed("metrics.jsonl"), "records of 0 steps"),
    "metrics are a folder": (replaced_by_a_folder("metrics.jsonl"), r"metrics\.jsonl is a folder; expected a file"),
    "config is a list": (edited("config.json", lambda _: b"[]"), r"config\.json is damaged"),
    "config is null": (edited("config.json", lambda _: b"null"), r"config\.json is damaged"),
    "config nested deep": (edited("config.json", lambda _: b"[" * 100_000), r"config\.json.*nested too deep"),
    "config nested just so deep": (
        edited("config.json", lambda _: b'{"a": ' * 800 + b"1" + b"}" * 800),
        r"config\.json is damaged: .* is nested more than 32 deep",
    ),
    "config is no text": (edited("config.json", lambda _: b"\xff\xfe"), r"config\.json is not text"),
    "config with a text for steps": (
        values("config.json", lambda stored: stored["rl"].update(steps="many")),
        r"config\.json is not a valid configuration",
    ),
    "config without a section": (values("config.json", lambda stored: stored.pop("rl")), "keys differ: rl"),
    "config gone": (removed("config.json"), "holds no run to resume"),
    "all checkpoints gone": (removed("checkpoints"), "records of 9 steps and no checkpoint to go on from"),
    "checkpoints are a file": (
        lambda folder: (removed("checkpoints")(folder), (folder / "checkpoints").write_text("")),
        "checkpoints cannot be looked into",
    ),
    "the last checkpoint is damaged": (
        edited("checkpoints/step-000009.safetensors", lambda content: content[:-1]),
        r"step-000009\.safetensors is not a whole safetensors file.*remove it to use the one before",
    ),
    "the last checkpoint is another one": (
        lambda folder: shutil.copy(*(folder / "checkpoints" / f"step-00000{n}.safetensors" for n in (6, 9))),
        r"step-000009\.safetensors is of step 6: it was renamed",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_named_and_nothing_is_written(folder, name):
    damage, message = DAMAGES[name]
    damage(folder)
    before = contents(folder)
    with counting(), pytest.raises(RunFolderError, match=message):
        train(config_of(11), folder, resume=True)
    assert contents(folder) == before


@pytest.mark.parametrize("last", [0, 4, 9])
def test_a_run_is_not_shortened_below_what_it_has_recorded(folder, last):
    without_checkpoints_after(folder, last)
    before = contents(folder)
    with (
        counting(),
        pytest.raises(ConfigError, match=r"rl\.steps = 8 is fewer than the 9 steps that .*run has recorded; give 9"),
    ):
        train(config_of(8), folder, resume=True)
    assert contents(folder) == before
    with counting():
        train(config_of(9), folder, resume=True)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_not_damaged_goes_on(folder):
    with counting():
        train(config_of(11), folder, resume=True)
    assert [record["step"] for record in records(folder)] == list(range(11))


def test_figures_are_checked_in_lines_that_no_checkpoint_vouches_for(folder):
    """A checkpoint whose digest is that of the lines as they are."""
    config = config_of(11)
    for damage in (
        line(8, lambda text: text.replace(b'"reward_mean": 0.5', b'"reward_mean": "high"')),
        line(8, lambda text: text[:-1] + b', "mismatch": [1]}'),
        line(8, lambda text: text.replace(b'"alarms": []', b'"alarms": [{"kind": "fire"}]')),
    ):
        kept = (folder / "metrics.jsonl").read_bytes()
        damage(folder)
        assert kept != (folder / "metrics.jsonl").read_bytes()
        last = RunFolder(folder).last_checkpoint()
        vouched = RunFolder(folder).metrics.digest(9)
        checkpoint = read_checkpoint(last)
        write_checkpoint(last, type(checkpoint)(checkpoint.state, checkpoint.config, vouched))
        with counting(), pytest.raises(RunFolderError, match="line 9 is damaged"):
            train(config, folder, resume=True)
        (folder / "metrics.jsonl").write_bytes(kept)


def test_a_checkpoint_of_another_configuration_is_refused(folder, tmp_path):
    with counting():
        other = train(config_of(seed=1), tmp_path / "other")
        last = RunFolder(folder).last_checkpoint()
        shutil.copy(other.last_checkpoint(), last)
        with pytest.raises(
            RunFolderError, match=r"step-000009\.safetensors was saved by a run of another configuration"
        ):
            train(config_of(11), folder, resume=True)


def test_steps_that_run_again_keep_the_lines_that_they_had(whole, folder):
    """Nothing that was recorded is cut off, and a torn last line is none."""
    without_checkpoints_after(folder, 6)
    path = folder / "metrics.jsonl"
    marked = path.read_bytes().replace(b'"step": 7,', b'"step": 7, "seconds": {"update": 1.0},')
    path.write_bytes(marked + b'{"step": 9, "rew')
    seen = []
    with counting():
        train(config_of(), folder, resume=True, watcher=Watcher(on_superseded=lambda *given: seen.append(given)))
    assert path.read_bytes() == marked
    assert not seen
    assert {each.name for each in folder.iterdir()} == {each.name for each in whole.path.iterdir()}


def test_other_thresholds_of_alarms_put_nothing_aside(folder):
    without_checkpoints_after(folder, 6)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    lines[7]["alarms"] = [{"kind": "stale_routes", "since": 0, "value": 0.5, "threshold": 0.9}]
    marked = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(marked)
    seen = []
    with counting():
        train(config_of(), folder, resume=True, watcher=Watcher(on_superseded=lambda *given: seen.append(given)))
    assert path.read_bytes() == marked
    assert not seen


def test_steps_that_come_out_otherwise_put_what_was_recorded_aside(whole, folder):
    """As on another machine."""
    without_checkpoints_after(folder, 6)
    path = folder / "metrics.jsonl"
    before = path.read_bytes().replace(b'"step": 7, "reward_mean": 0.5', b'"step": 7, "reward_mean": 0.25')
    assert before != path.read_bytes()
    path.write_bytes(before)
    seen = []
    with counting():
        train(config_of(), folder, resume=True, watcher=Watcher(on_superseded=lambda *given: seen.append(given)))
    aside = folder / "superseded-1.jsonl"
    assert seen == [(7, aside)]
    assert aside.read_bytes() == b"".join(before.splitlines(keepends=True)[7:])
    assert path.read_bytes() == whole.metrics.path.read_bytes()


def test_a_checkpoint_vouches_for_the_lines_before_its_step_and_for_no_other(tmp_path):
    """Lines of later steps may be there: those of steps that run again."""
    run = RunFolder(tmp_path)
    run.metrics.path.write_bytes(b"".join(b'{"step": %d}\n' % step for step in range(4)))
    path = run.save_checkpoint(2, {"model": {}})
    run.metrics.path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"step": 2, "reward_mean": 1.0}\n')
    run.metrics.take_up(2, run.load(path).metrics)
    run.metrics.path.write_bytes(b'{"step": 0}\n{"step": 1, "reward_mean": 1.0}\n')
    with pytest.raises(RunFolderError, match="the lines of the steps before 2 are not those that were there"):
        run.metrics.take_up(2, run.load(path).metrics)


@pytest.mark.parametrize("links", [True, False])
def test_a_rollouts_trace_is_among_those_of_the_run_and_stored_once_where_it_can_be(
    whole, tmp_path, monkeypatch, links
):
    def link(source, target):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", link)
        monkeypatch.setattr(writing, "OPEN_FILES", "/nowhere")  # no links, and so no names for files without one
    generation = load_generation(whole.path / "rollouts" / "step-000008.safetensors")
    for _ in range(2):  # as by a step that runs again
        RunFolder(tmp_path).save_rollout(3, generation)
    trace = tmp_path / "traces" / "step-000003.safetensors"
    assert load(trace).equals(generation.trace)
    assert (trace.stat().st_nlink == 2) is links
    assert load_generation(tmp_path / "rollouts" / trace.name).trace.equals(generation.trace)


def test_what_is_put_aside_twice_is_kept_twice(tmp_path):
    """A run that is resumed on another machine, and on a third."""
    path = tmp_path / "metrics.jsonl"
    for number, reward in enumerate((0.1, 0.2), 1):
        run = RunFolder(tmp_path)
        path.write_text(f'{{"step": 0, "reward_mean": {reward}}}\n')
        run.metrics.take_up(0, run.metrics.digest(0))
        written = {"step": 0, "reward_mean": 0.3}
        assert run.metrics.append(written) == (written, tmp_path / f"superseded-{number}.jsonl")
        assert json.loads(path.read_bytes()) == written
    rewards = [json.loads((tmp_path / f"superseded-{n}.jsonl").read_text())["reward_mean"] for n in (1, 2)]
    assert rewards == [0.1, 0.2]


def test_a_run_that_ended_before_its_first_checkpoint_is_begun_again(tmp_path):
    with counting():
        run = RunFolder(tmp_path / "run", config_of())
        run.begin()
        train(config_of(), tmp_path / "run", resume=True)
    assert len(records(tmp_path / "run")) == 9


def test_data_is_remembered_and_a_damaged_memory_is_named(tmp_path):
    run, digest, other = RunFolder(tmp_path), "0123abcd" * 4, "0123abce" * 4
    with pytest.raises(RunFolderError, match=r"data\.txt does not exist: the data of the run is not known"):
        run.bind_data(digest, begun=True)
    run.bind_data(digest, begun=False)
    run.bind_data(digest, begun=True)
    with pytest.raises(RunFolderError, match="started with other data"):
        run.bind_data(other, begun=True)
    two = f"{digest} {other}".encode()  # of data and of evaluation's, where there is one
    for damaged in (b"", digest[:-1].encode(), b"\xff" * 32, digest.upper().encode(), two):
        (tmp_path / "data.txt").write_bytes(damaged)
        with pytest.raises(RunFolderError, match=r"data\.txt is (damaged: it holds|not text)"):
            run.bind_data(digest, begun=True)


def test_a_folder_is_in_use_by_one_run(folder, tmp_path):
    """The second is refused before it writes anything, in the warm start too, and the first goes on."""
    refused = []

    def try_again(*_):
        for resume, message in ((False, "not empty"), (True, "already in use: another process trains in it")):
            with pytest.raises(RunFolderError, match=message):
                train(config_of(), tmp_path / "new", resume=resume)
            refused.append(message)

    with counting():
        train(config_of(), tmp_path / "new", watcher=Watcher(on_step=try_again))
        assert len(refused) == 18
        with RunFolder(folder).held(), pytest.raises(RunFolderError, match="run is already in use"):
            train(config_of(11), folder, resume=True)
        train(config_of(11), folder, resume=True)
    assert len(records(tmp_path / "new")) == 9
    assert not (folder / ".lock").exists()


def test_a_new_folder_is_held_before_anything_is_in_it_and_removed_when_nothing_is_written(tmp_path):
    with RunFolder(tmp_path / "new").held(), counting():
        with pytest.raises(RunFolderError, match="new is already in use"):
            train(config_of(), tmp_path / "new")
        assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]
    assert not (tmp_path / "new").exists()


def test_a_file_system_without_locks_is_trained_on_all_the_same(tmp_path, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunFolder(tmp_path / "run").held():
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    assert not (tmp_path / "run").exists()


def test_a_folder_is_new_with_what_a_kill_left_and_with_nothing_else(tmp_path):
    run = RunFolder(tmp_path, config_of())
    for name in (".lock", ".config.json.0a1b2c3d", ".config.json.foreroute"):
        (tmp_path / name).touch()
    run.require_new()
    for name in ("config.json", ".config.json.mine", "notes.lock", ".config.json.0a1b2c3d4"):
        (tmp_path / name).touch()
        for look in (run.require_new, run.begin):
            with pytest.raises(RunFolderError, match="is not empty; nothing was changed"):
                look()
        assert not (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
    run.begin()
    run.require_begun()


def test_a_lock_of_a_file_that_is_gone_is_none(tmp_path, monkeypatch):
    """Who held it removes it when it ends, which may be just before another one gets it."""
    take, removed = fcntl.flock, []

    def flock(descriptor, how):
        take(descriptor, how)
        if not removed:
            removed.append((tmp_path / ".lock").unlink())

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunFolder(tmp_path).held():
        assert removed
        with pytest.raises(RunFolderError, match="already in use"), RunFolder(tmp_path).held():
            pass


HOLD = """
import sys, time
from pathlib import Path
from foreroute.train import RunFolder
with RunFolder(Path(sys.argv[1])).held():
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_system_lets_go_of_a_folder_whose_process_was_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with counting():
        with pytest.raises(RunFolderError, match="already in use"):
            train(config_of(), tmp_path / "run")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        train(config_of(), tmp_path / "run")
    assert len(records(tmp_path / "run")) == 9


def test_a_model_is_replaced_whole_and_what_a_kill_left_is_cleaned_up(tmp_path):
    run = RunFolder(tmp_path)

    def write(text):
        def into(folder: Path):
            folder.mkdir()
            (folder / "weights").write_text(text)

        return into

    def dies(folder: Path):
        write("half")(folder)
        raise KeyboardInterrupt

    run.save_model(write("first"))
    with pytest.raises(KeyboardInterrupt):
        run.save_model(dies)
    assert (tmp_path / "model" / "weights").read_text() == "first"
    # killed after the old one was put aside, and before the new one was in its place
    os.replace(tmp_path / "model", tmp_path / ".model.replaced")
    run.save_model(write("second"))
    assert (tmp_path / "model" / "weights").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    run.save_model(write("third"))
    assert (tmp_path / "model" / "weights").read_text() == "third"
    assert (tmp_path / "elsewhere").is_dir()


def test_a_metrics_file_goes_on_behind_what_was_written_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"st')
    metrics = MetricsFile(path)
    assert metrics.records() == [{"step": 0}]
    metrics.take_up(0, metrics.digest(0))
    assert metrics.append({"step": 0, "seconds": {"rollout": 3.0}}) == ({"step": 0}, None)
    metrics.append({"step": 1})
    assert path.read_bytes() == b'{"step": 0}\n{"step": 1}\n'
