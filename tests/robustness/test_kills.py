"""Runs that are killed at random moments (SIGKILL, SIGTERM, SIGINT) end with the bits of one that was not.

They are forked from a process that has imported everything, since the imports would be most of their time. Kills at
every touch of the disk are those of `tests/train/test_kill_points.py`, and of verbs that write one file those of
`tests/files/test_writing.py`.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from foreroute.capture import load_generation
from foreroute.cli.main import main as command_line
from foreroute.errors import ForerouteError
from foreroute.files.container import TensorFile
from foreroute.records import read_runs
from tests.robustness import NIGHT
from tests.robustness.target import bits
from tests.train.small_runs import small_values

pytestmark = pytest.mark.exhaustive
STEPS, KILLS, AT_MOST = (24, 200, 6) if NIGHT else (4, 2, 2)
"""Steps of a run, kills in all, and kills of one run."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 300.0
"""A command that takes longer hangs."""


class Command:
    """`foreroute ARGUMENTS` in a process of its own."""

    def __init__(self, arguments, log):
        self._log = log
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "foreroute.adapters.hf", "foreroute.cli.train"])
        self._process = context.Process(target=_command, args=([str(each) for each in arguments], str(log)))
        self._process.start()
        while self.runs() and not log.exists():  # to start a process takes longer than some commands
            time.sleep(0.002)

    def runs(self):
        return self._process.exitcode is None

    def kill_after(self, seconds, rng):
        """Send one of the signals so long from now; which, or None when it had ended by itself."""
        end = time.monotonic() + seconds
        while self.runs() and time.monotonic() < end:
            time.sleep(0.002)
        number = rng.choice(SIGNALS)
        if not self.runs():
            return None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        return number

    def wait(self):
        """Its exit code, below 0 for a signal, and all that it printed."""
        self._process.join(PATIENCE_S)
        if self.runs():
            self._process.kill()
            self._process.join()
            raise AssertionError(f"a command hangs: {self._log.read_text()}")
        printed = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return self._process.exitcode, printed


def _command(arguments, log):
    """In the forked process: what a shell and the entry point do before the command line runs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # the log comes last: from then on no signal falls into what multiprocessing does
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["foreroute", *arguments]
    command_line()


@dataclass
class Whole:
    """A run that nobody killed, and what its folder holds."""

    config: Path
    folder: Path
    seconds: float
    content: Any


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    home = tmp_path_factory.mktemp("kills")
    often = {"checkpoint": {"every": 1}, "measure": {"save_trace_every": 1}}  # much of a step is saving
    config = home / "train.toml"
    config.write_text(tomli_w.dumps(small_values(rl={"steps": STEPS, "mini_steps": 2}, **often)))
    command, begun = Command(["train", config, "--folder", home / "run"], home / "log"), time.monotonic()
    code, printed = command.wait()
    assert code == 0, printed
    return Whole(config, home / "run", time.monotonic() - begun, read(home / "run"))


def read(folder):
    """Everything that is in a run's folder, as its readers read it, finished or not; None of one that is not."""
    from foreroute.train.folder import load_checkpoint

    if recorded(folder):
        read_runs([folder])
    for path in folder.glob("model/*.safetensors"):
        TensorFile(path, ForerouteError).close()
    readers = {"checkpoints": load_checkpoint, "rollouts": load_generation}
    content = {
        path.name: bits(load(path))
        for name, load in readers.items()
        for path in sorted(folder.glob(f"{name}/step-??????.safetensors"))
    }
    if not (folder / "model").exists():
        return None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return content, [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def recorded(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def faults(folder, whole, *, is_done):
    """What is not as it must be: something that is not whole, or at the end other bits, or files."""
    try:
        content = read(folder)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    found = ["other content"] if content is not None and content != whole.content else []
    return found + [f"{name} is left" for name in names(folder) ^ names(whole.folder) if is_done]


def killed(folder, whole, rng):
    """Take a run to its end, killed on its way: how often, and what was not as it must be."""
    kills, found = 0, []
    for number in range(AT_MOST + 1):
        resumed = ["--resume"] if (folder / "config.json").exists() else []
        command = Command(
            ["train", whole.config, "--folder", folder, *resumed], folder.with_name(f"{folder.name}-{number}")
        )
        sent = command.kill_after(moment(folder, whole, command, rng), rng) if number < AT_MOST else None
        code, printed = command.wait()
        kills += sent is not None
        if code not in ((0,) if sent is None else (0, -sent, 128 + sent)) or "Traceback" in printed:
            found.append(f"exit code {code} after {sent}: {printed[-2000:]}")
        found += faults(folder, whole, is_done=sent is None)
        if sent is None or found:
            break
    return kills, found


def moment(folder, whole, command, rng):
    """Seconds to wait: while a run begins, or from one of its next steps on."""
    if rng.random() < 0.2:
        return rng.uniform(0, 0.4 * whole.seconds)
    reach = recorded(folder) + rng.randint(1, 4)
    while command.runs() and recorded(folder) < reach:
        time.sleep(0.005)
    return rng.uniform(0, whole.seconds / STEPS)


def test_killed_runs_end_with_the_same_bits(tmp_path, whole):
    """The moments depend on the machine, and are others each time."""
    kills, seed = 0, random.randrange(2**32)
    for number in range(20 * KILLS):
        more, found = killed(tmp_path / f"run{number}", whole, random.Random(f"{seed} {number}"))
        kills += more
        assert not found, f"seed {seed}, run {number}"
        if kills >= KILLS:
            break
    print(f"{kills} kills with the same bits")
    assert kills >= KILLS


def put_more(path):
    """Another reward in the first line."""
    path.write_text(path.read_text().replace('"reward_mean": ', '"reward_mean": 9', 1))


CARELESS = {
    "": lambda folder: None,
    "is left": lambda folder: (folder / "more").touch(),
    "other content": lambda folder: put_more(folder / "metrics.jsonl"),
    "Error: ": lambda folder: os.truncate(next(folder.glob("rollouts/*")), 900),
}


@pytest.mark.parametrize("seen", CARELESS)
def test_what_a_careless_run_leaves_is_seen(tmp_path, whole, seen):
    """The first is careful, and is the control of the others."""
    shutil.copytree(whole.folder, tmp_path / "run")
    CARELESS[seen](tmp_path / "run")
    found = faults(tmp_path / "run", whole, is_done=True)
    assert len(found) == bool(seen)
    assert seen in "".join(found)
