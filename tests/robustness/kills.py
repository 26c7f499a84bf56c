"""Verbs of the command line, killed at random moments (SIGKILL, SIGTERM, SIGINT) and given again.

They are forked from a process that has imported everything, since the imports would be most of their time, or started
anew. A run is killed over and over, resumed each time, and ends like one that was not. What a kill leaves is whole, or
not there.
"""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from foreroute.capture import load_generation
from foreroute.cli.main import main as command_line
from foreroute.errors import ForerouteError
from foreroute.files.container import TensorFile
from foreroute.plan import load_plan, save_counts
from foreroute.records import read_runs
from foreroute.testing.ranks import environment
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import load, save
from tests.robustness.target import bits
from tests.robustness.texts import TOPOLOGY
from tests.traces import spec_of
from tests.train.small_runs import small_values

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 300.0
"""A command that takes longer hangs."""
AT_MOST = 6
"""Kills of one run on its way."""
PRELOADED = ("adapters.hf", "planner", "cli.convert", "cli.plan", "cli.train")


@dataclass
class Tally:
    """What was seen: how many were killed, which ends were the same, and what readers and commands tripped over."""

    kills: int = 0
    same: list[bool] = field(default_factory=list)
    tripped: list[str] = field(default_factory=list)

    def __str__(self):
        return (
            f"{self.kills} kills: {sum(self.same)} of {len(self.same)} with the same bits, {len(self.tripped)} tripped"
        )


@dataclass
class Verb:
    """A command that is killed.

    Attributes:
        words: the command line that fills a folder, or goes on filling it; `whole`, where nobody kills it.
        read: the content of a folder; None when it isn't there yet. Raises when something is not whole.
        moment: when to kill, given the folder and a function that says whether the command runs: returns seconds to
            wait from then on. By default any, and more often towards the end, where files are written.
    """

    whole: Path
    words: Callable[[Path], list[Any]]
    read: Callable[[Path], Any]
    moment: Callable[[Path, Callable[[], bool], random.Random], float] | None = None

    @cached_property
    def seconds(self):
        """What it takes when nobody kills it; the content is then in `whole`."""
        command = Command(self.words(self.whole), self.whole.with_suffix(".log"))
        begun = command.begins()
        assert command.wait() == 0, command.printed()
        return time.monotonic() - begun

    def killed(self, folder, rng, tally, kills, *, forked=True):
        """Fill a folder, killed at most so often on the way."""
        most_s, expected = self.seconds, self.read(self.whole)
        for number in range(min(kills, AT_MOST) + 1):
            command = Command(self.words(folder), folder.with_name(f"{folder.name}-{number}.log"), forked=forked)
            begun = command.begins()
            sent = None
            if number < min(kills, AT_MOST):
                moment = self.moment or (lambda *_: most_s * rng.random() ** 0.5)
                sent = command.kill_after(moment(folder, command.runs, rng), rng)
            code, printed = command.wait(), command.printed()
            tally.kills += sent is not None
            ends = (0,) if sent is None else (0, -sent, 128 + sent)
            if code not in ends or "Traceback" in printed:
                tally.tripped.append(f"{folder.name}: exit code {code} after {sent}: {printed[-2000:]}")
            try:
                content = self.read(folder)
            except Exception as error:
                tally.tripped.append(f"{folder.name}: {type(error).__name__}: {error}")
                break
            if content is not None:
                tally.same.append(content == expected)
            if sent is None:
                if self.moment is None:
                    # the machine is faster, or less busy, than it was
                    self.seconds = min(most_s, time.monotonic() - begun)
                break
        tally.tripped += [f"{folder.name}: {name} is left" for name in _names(folder) ^ _names(self.whole)]
        shutil.rmtree(folder)


def verbs(home, steps):
    """What is killed, by name, with its inputs in a folder; a run has so many steps."""
    train, topology, trace, counts = (
        home / name for name in ("train.toml", "topology.toml", "trace.safetensors", "counts.safetensors")
    )
    often = {"checkpoint": {"every": 1}, "measure": {"save_trace_every": 1}}  # much of a step is saving
    train.write_text(tomli_w.dumps(small_values(rl={"steps": steps, "mini_steps": 2}, **often)))
    topology.write_text(tomli_w.dumps(TOPOLOGY))
    save(synthetic_trace(spec_of(128, 8, 24), [500] * 8, seed=0, weight_version=0), trace, encoding="ordered")
    save_counts(np.random.default_rng(0).integers(0, 400, (4, 24, 8, 128), np.int32), counts)

    def converting(folder):
        (folder / "out").unlink(missing_ok=True)
        return ["convert", trace, folder / "out", "--to", "sets"]

    def planning(folder):
        given = [counts, "--topology", topology, "--no-baselines"]
        return ["plan", *given, "--output", folder / "plan.safetensors", "--overwrite"]

    def training(folder):
        begun = (folder / "config.json").exists()
        return ["train", train, "--folder", folder, *(["--resume"] if begun else [])]

    def reporting(folder):
        assert run.seconds, "there is a run to report"
        return ["report", run.whole, "--output", folder / "page.html"]

    def in_a_run(folder, runs, rng):
        """While it begins; or in one of the next steps."""
        if rng.random() < 0.2:
            return rng.uniform(0, 0.4 * run.seconds)
        reach = _recorded(folder) + rng.randint(1, 4)
        while runs() and _recorded(folder) < reach:
            time.sleep(0.005)
        return rng.uniform(0, run.seconds / steps)

    run = Verb(home / "run", training, _read_run, in_a_run)
    return {
        "convert": Verb(home / "convert", converting, lambda folder: _read(folder / "out", load)),
        "plan": Verb(home / "plan", planning, _read_plan),
        "run": run,
        "report": Verb(home / "report", reporting, lambda folder: _read(folder / "page.html", _whole_page)),
    }


class Command:
    """`foreroute ARGUMENTS` in a process of its own: forked from one that has imported everything, or started anew."""

    def __init__(self, arguments, log, *, forked=True):
        self._log, words = log, [str(each) for each in arguments]
        if forked:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__, *(f"foreroute.{name}" for name in PRELOADED)])
            process = context.Process(target=_command, args=(words, str(log)))
            process.start()
            self._code = lambda: process.exitcode
        else:
            with open(log, "wb") as file:
                words = [sys.executable, "-m", "foreroute.cli", *words]
                process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment())
            self._code = process.poll
        self._pid = process.pid

    def runs(self):
        """Whether it does still."""
        return self._code() is None

    def begins(self):
        """When the command line runs, on the monotonic clock. To start a process takes longer than some commands."""
        while self.runs() and not self._log.exists():
            time.sleep(0.002)
        return time.monotonic()

    def kill_after(self, seconds, rng):
        """Send one of the signals so long from now; which, or None when it had ended by itself."""
        end = time.monotonic() + seconds
        while self.runs() and time.monotonic() < end:
            time.sleep(0.002)
        number = rng.choice(SIGNALS)
        if not self.runs():
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, number)
        return number

    def wait(self):
        """Its exit code, below 0 for a signal."""
        end = time.monotonic() + PATIENCE_S
        while (code := self._code()) is None:
            if time.monotonic() > end:
                os.kill(self._pid, signal.SIGKILL)
                raise AssertionError(f"a command hangs: {self.printed()}")
            time.sleep(0.005)
        return code

    def printed(self):
        """Everything."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""


def _command(arguments, log):
    """In the forked process: what a shell and the entry point do before the command line runs.

    The log comes last: from then on no signal falls into what multiprocessing does.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["foreroute", *arguments]
    command_line()


def _read(path, load):
    """The content of a file to the bit, or None where it is not there yet."""
    return bits(load(path)) if path.exists() else None


def _whole_page(path):
    text = path.read_text(encoding="utf-8")
    assert text.rstrip().endswith("</html>"), f"{path} is half written"
    return text


def _read_plan(folder):
    _read(folder / "plan.html", _whole_page)
    return _read(folder / "plan.safetensors", load_plan)


def _read_run(folder):
    """Everything that is in a run's folder, as its readers read it, finished or not; None of one that is not."""
    from foreroute.train.folder import load_checkpoint

    if _recorded(folder):
        read_runs([folder])
    for path in sorted(folder.glob("model/*.safetensors")):
        TensorFile(path, ForerouteError).close()
    content = {
        path.name: _read(path, read)
        for pattern, read in (
            ("checkpoints/step-??????.safetensors", load_checkpoint),
            ("rollouts/step-??????.safetensors", load_generation),
        )
        for path in sorted(folder.glob(pattern))
    }
    if not (folder / "model").exists():
        return None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return content, [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def _recorded(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
