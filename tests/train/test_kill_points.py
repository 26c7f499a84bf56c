"""A run that dies at any touch of the disk, and is taken up again, ends as if nothing had been."""

import builtins
import os
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest

from foreroute.capture import load_generation
from foreroute.errors import RunFolderError
from foreroute.records import read_runs
from foreroute.trace import digest
from foreroute.train import folder as run_folder
from foreroute.train import train
from tests.train.counting_runs import counting, counting_config

pytestmark = pytest.mark.slow


class Killed(BaseException):
    """No `except Exception` sees it, and what cleans up after it fails too."""


class Disk:
    """Counts touches of a folder, and dies at one of them; None lives on. Other places are not on this disk."""

    def __init__(self, folder, dies_at=None):
        self.folder, self.touches, self.dies_at = str(folder), 0, dies_at

    def touch(self, path):
        if str(path).startswith(self.folder):
            if self.dies_at is not None and self.touches >= self.dies_at:
                raise Killed
            self.touches += 1

    def stopping(self, name):
        real = getattr(os, name)

        def call(path, *args, **options):
            # opening makes a file only when told so
            if name != "open" or args[0] & os.O_CREAT:
                self.touch(path)
            return real(path, *args, **options)

        return mock.patch.object(os, name, call)

    def open(self, path, mode="r", **options):
        """Appending is two touches, with half of what is written between them."""
        file = builtins.open(path, mode, **options)  # noqa: SIM115  its user closes it
        if "a" in mode:
            real = file.write

            def write(text):
                for half in (text[: len(text) // 2], text[len(text) // 2 :]):
                    self.touch(path)
                    real(half)
                    file.flush()

            file.write = write
        return file


@contextmanager
def on(disk):
    """Files are made, moved, removed and appended to on this disk."""
    with ExitStack() as held:
        held.enter_context(mock.patch.object(run_folder, "open", disk.open, create=True))
        for name in ("replace", "unlink", "mkdir", "link", "open"):
            held.enter_context(disk.stopping(name))
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not killed, and how often it touched the disk."""
    folder = tmp_path_factory.mktemp("kills") / "whole"
    config, disk = counting_config(checkpoint={"every": 2, "keep": 1}), Disk(folder)
    with counting():
        with on(disk):
            run = train(config, folder)
        yield run, config, disk.touches


def test_any_point_of_a_run_can_be_the_last(tmp_path, whole):
    """Every one of the beginning and of the first steps, which have a trace, metrics and a checkpoint; then some."""
    run, config, touches = whole
    assert touches > 40  # all of the first 20 are tried, and every fifth of the others
    torn = begun_anew = 0
    kept = -1
    for point in [*range(20), *range(20, touches, 5)]:
        folder = tmp_path / str(point)
        with pytest.raises(Killed), on(Disk(folder, dies_at=point)):
            train(config, folder)
        last = run_folder.RunFolder(folder).last_checkpoint()
        before, kept = kept, run_folder.load_checkpoint(last)["step"] if last else -1
        assert before <= kept, point
        metrics = folder / "metrics.jsonl"
        torn += metrics.exists() and not metrics.read_text().endswith("\n")
        if metrics.exists() and "\n" in metrics.read_text():
            read_runs([folder])
        if (folder / "config.json").exists():
            train(config, folder, resume=True)
        else:
            begun_anew += 1
            with pytest.raises(RunFolderError):
                train(config, folder, resume=True)
            train(config, folder)
        assert files(folder) == files(run.path), point
        assert not [*folder.glob("checkpoints/.*")], "what a kill left is gone"
    assert torn
    assert 1 <= begun_anew <= 5


def files(folder):
    """What is in a folder, but for temporary files; of traces, what they hold."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): content(path) for path in found}


def content(path):
    if path.parent.name == "rollouts":
        rollout = load_generation(path)
        return digest(rollout.trace), rollout.logprobs_R.tolist()
    return path.read_bytes()
