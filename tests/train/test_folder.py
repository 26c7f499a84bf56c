"""A run folder with something damaged, missing or foreign: one error that names it, and nothing is lost."""

import re
import resource
import shutil

import pytest

from foreroute.errors import ConfigError, RunFolderError
from foreroute.train import RunFolder, train
from foreroute.train.folder import load_checkpoint
from tests.train.counting_runs import counting, counting_config
from tests.train.small_runs import records, same_state


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of nine steps, with checkpoints of steps 0, 2, 4, 6, 8 and 9."""
    with counting():
        yield train(counting_config(), tmp_path_factory.mktemp("damaged") / "whole")


@pytest.fixture
def folder(whole, tmp_path):
    shutil.copytree(whole.path, tmp_path / "run")
    return tmp_path / "run"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edited(name, change):
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


DAMAGES = {
    "a line that is no JSON": (
        edited("metrics.jsonl", lambda text: text.replace(b"}\n", b"\n", 1)),
        r"metrics\.jsonl, line 1.*not JSON",
    ),
    "lines missing": (edited("metrics.jsonl", lambda text: text[:100]), r"step 9: lines.*miss"),
    "config that is no JSON": (edited("config.json", lambda text: text[:-1]), r"config\.json.*not JSON"),
    "config with another learning rate": (
        edited("config.json", lambda text: re.sub(rb'"learning_rate": [^,\n]+', b'"learning_rate": 1.0', text)),
        "keys differ: .*rl.learning_rate",
    ),
    "config gone": (lambda folder: (folder / "config.json").unlink(), r"no run.*resume"),
    "the last checkpoint is damaged": (
        edited("checkpoints/step-000009.safetensors", lambda content: content[:-1]),
        r"step-000009\.safetensors .*not.*whole.*remove",
    ),
    "the last checkpoint is another one": (
        lambda folder: shutil.copy(*(folder / "checkpoints" / f"step-00000{n}.safetensors" for n in (6, 9))),
        r"step-000009\.safetensors .*step 6: .*renamed",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_named_and_nothing_is_written(folder, name):
    damage, message = DAMAGES[name]
    damage(folder)
    before = contents(folder)
    with counting(), pytest.raises(RunFolderError, match=message):
        train(counting_config(11), folder, resume=True)
    assert contents(folder) == before


def test_a_run_is_not_begun_anew_nor_shortened_below_what_it_has_recorded(folder):
    before = contents(folder)
    for config, resume, error in ((counting_config(8), True, ConfigError), (counting_config(), False, RunFolderError)):
        with counting(), pytest.raises(error):
            train(config, folder, resume=resume)
    assert contents(folder) == before


def writer(text):
    def write(folder):
        folder.mkdir()
        (folder / "weights").write_text(text)
        if text == "killed":
            raise KeyboardInterrupt

    return write


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_model_is_replaced_whole_and_what_a_kill_left_is_cleaned_up(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr("foreroute.train.folder.ctypes.CDLL", lambda name: None)
    run, weights = RunFolder(tmp_path), tmp_path / "model" / "weights"
    run.save_model(writer("first"))
    with pytest.raises(KeyboardInterrupt):
        run.save_model(writer("killed"))
    assert weights.read_text() == "first"
    run.save_model(writer("second"))
    assert weights.read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError):  # what a link points at is left alone
        run.save_model(writer("third"))
    assert (tmp_path / "elsewhere").is_dir()


def test_a_full_disk_is_one_error_and_what_was_written_is_whole(tmp_path, monkeypatch):
    """The metrics of step 2 are cut."""
    config, append = counting_config(), RunFolder.append

    def on_a_full_disk(run, record):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if record.step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (150, before[1]))
        try:
            append(run, record)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with counting():
        expected = train(config, tmp_path / "whole")
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "append", on_a_full_disk)
            with pytest.raises(RunFolderError, match=r"metrics\.jsonl.*--resume"):
                train(config, tmp_path / "run")
        assert load_checkpoint(RunFolder(tmp_path / "run").last_checkpoint())["step"] == 2
        resumed = train(config, tmp_path / "run", resume=True)
    assert records(resumed.path) == records(expected.path)
    assert same_state(load_checkpoint(resumed.last_checkpoint()), load_checkpoint(expected.last_checkpoint()))
