"""Kills at random moments, and flipped bits.

Commands are killed (SIGKILL, SIGTERM, SIGINT) while they train, save, plan and report. They are forked from a process
that has imported everything, since the imports would be most of their time; some are started anew. A run is killed over
and over, resumed each time, and ends like one that was not. Other commands are given again.

    metrics.kills               processes that were killed
    metrics.same_bits           share of what was killed that ended with the same bits as what was not: weights,
                                optimizer, all metrics but times, rollouts, traces, plans, pages
    metrics.leftovers_tripped   times that a reader refused what a kill had left, or that a finished folder held more
                                than it should
    metrics.flips               bits that were flipped, one at a time, in every kind of file
    metrics.flips_accepted_wrong   of those, read as something else: another content of what has a checksum, a broken
                                rule of what is text
    metrics.flips_unnamed       those with a checksum that were refused by an error that does not name them
    metrics.tracebacks          of the killed commands, and of readers of flipped bits
    metrics.stops_without_checkpoint   runs that a SIGTERM or SIGINT ended with exit code 0 and steps to run again
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import flips
from benchmarks.harness.tiny_run import VALUES, same_state
from foreroute.capture import load_generation
from foreroute.cli.main import main as command_line
from foreroute.errors import ForerouteError
from foreroute.files import TensorFile
from foreroute.plan import load_plan, save_counts
from foreroute.records import read_runs
from foreroute.trace import RoutedLayer, RoutingSpec, load, save
from foreroute.trace.synthetic import synthetic_trace
from foreroute.train import RunFolder, load_checkpoint, parse_config
from foreroute.train.folder import NAME

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 300.0
"""A command that takes longer hangs."""
OFTEN = {"checkpoint": {"every": 1}, "measure": {"save_trace_every": 1}}
"""Much of a step is saving."""
MODEL = "[hardware]\npreset = 'h100'\n[model]\npreset = 'qwen3-30b-a3b'\n"
TOPOLOGY = f"[topology]\nnum_ranks = 8\nredundant_slots = 2\n{MODEL}"
SIMULATION = f"methods = ['ours']\n[cluster]\ngpus = 8\nexpert_parallel = 8\n{MODEL}"
OTHERS = ("convert", "plan", "report")
KILLS_OF_RUN, KILLS_OF_OTHER = 6, 3
PRELOADED = ("adapters.hf", "planner", "cli.convert", "cli.plan", "cli.train")
Process = Any


@dataclass
class Tally:
    """What was seen."""

    kills: int = 0
    same: list[bool] = field(default_factory=list)
    tripped: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    without_checkpoint: int = 0

    def add(self, other: Tally) -> None:
        """What another one has seen too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


MUST_BE = {
    "same_bits": 1.0,
    **dict.fromkeys(("leftovers_tripped", "flips_accepted_wrong", "flips_unnamed", "tracebacks"), 0),
}
"""Metrics of a run in which all is well."""


def run(*, quick: bool) -> dict[str, Any]:
    """10 kills, and 8 flips of each kind, when quick; 200 kills, and 200 flips of each kind, otherwise."""
    if quick:
        return measured(steps=10, kills={"run": 4, "convert": 2, "plan": 2, "report": 2}, anew=0, flips_of_kind=8)
    return measured(steps=24, kills={"run": 110, "convert": 30, "plan": 30, "report": 30}, anew=5, flips_of_kind=200)


def measured(
    *, steps: int, kills: Mapping[str, int], anew: int, flips_of_kind: int, seed: int | None = None
) -> dict[str, Any]:
    """The metrics.

    Args:
        steps: of each run.
        kills: of "run", "convert", "plan" and "report", at least.
        anew: of the runs, those whose processes are started anew.
        flips_of_kind: of each kind of file.
        seed: of the moments, which depend on the machine too; another one each time by default.
    """
    seed = random.randrange(2**32) if seed is None else seed
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        home = Home(Path(name), steps)
        began = time.monotonic()
        home.prepare(pool)
        prepared_s, began = time.monotonic() - began, time.monotonic()
        runs = partial(home.killed_run, forked=True), partial(home.killed_run, forked=False)
        wanted = [("run", runs[0], kills["run"] - anew - (half := (kills["run"] - anew) // 2)), ("run", runs[0], half)]
        wanted += [("anew", runs[1], anew), *((each, getattr(home, each), kills[each]) for each in OTHERS)]
        work = [
            partial(_killed_often, task, f"{kind}-{number}", count, random.Random(f"{seed} {number}"))
            for number, (kind, task, count) in enumerate(wanted)
        ]
        tally = Tally()
        for future in [pool.submit(each) for each in work]:
            tally.add(future.result())
        killed_s, began = time.monotonic() - began, time.monotonic()
        found = home.flipped(flips_of_kind, seed)
        flipped_s = time.monotonic() - began
    metrics = {
        "kills": tally.kills,
        "same_bits": sum(tally.same) / max(len(tally.same), 1),
        "leftovers_tripped": len(tally.tripped),
        "flips": sum(each.flips for each in found.values()),
        "flips_accepted_wrong": sum(each.accepted_wrong for each in found.values()),
        "flips_unnamed": sum(each.unnamed for each in found.values()),
        "tracebacks": len(tally.tracebacks) + sum(each.tracebacks for each in found.values()),
        "stops_without_checkpoint": tally.without_checkpoint,
        "compared": len(tally.same),
        "seed": seed,
        "seconds": {"prepare": round(prepared_s), "kills": round(killed_s), "flips": round(flipped_s)},
        "by_kind": flips.summary(found),
        "seen": [text[-2000:] for text in (*tally.tripped, *tally.tracebacks)][:10],
    }
    return {"metrics": metrics, "baselines": {}}


class Home:
    """A folder with what commands are given, and what they make of it when nobody kills them."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps = path, steps
        self.values = {**VALUES, **OFTEN, "rl": {**VALUES["rl"], "steps": steps}}
        self.train, self.topology, self.simulate = (path / f"{n}.toml" for n in ("train", "topology", "simulate"))
        self.trace, self.counts, self.whole = path / "trace.safetensors", path / "counts.safetensors", path / "whole"
        self.seconds: dict[str, float] = {}

    def prepare(self, pool: ThreadPoolExecutor) -> None:
        """Write the inputs, and run every command once to its end."""
        import tomli_w

        self.train.write_text(tomli_w.dumps(self.values))
        self.topology.write_text(TOPOLOGY)
        self.simulate.write_text(SIMULATION)
        spec = RoutingSpec(num_experts=128, top_k=8, layers=tuple(RoutedLayer(each) for each in range(24)))
        save(synthetic_trace(spec, [500] * 16, seed=0, weight_version=0), self.trace)
        rng = np.random.default_rng(0)
        save_counts(rng.integers(0, 400, (16, 24, 8, 128), np.int32), self.counts)
        planned = self.path / "planned"
        others = [
            pool.submit(self._timed, "convert", self.converting(self.path / "converted")),
            pool.submit(self._timed, "plan", self.planning(planned / "plan.safetensors")),
        ]
        self._timed("train", ["train", self.train, "--folder", self.whole])
        for each in others:
            each.result()
        self._timed("report", self.reporting(planned / "page.html"))

    def _timed(self, name: str, arguments: Sequence[Any]) -> None:
        began, command = time.monotonic(), Command(arguments, self.path / f"{name}.log")
        if command.wait() != 0:
            raise RuntimeError(f"{name} failed: {command.printed()}")
        self.seconds[name] = time.monotonic() - began

    def converting(self, target: Path) -> list[Any]:
        """The command that saves a trace."""
        return ["convert", self.trace, target, "--to", "ordered"]

    def planning(self, target: Path) -> list[Any]:
        """The command that saves a plan and its page."""
        given = ["--topology", self.topology, "--counts", self.counts, "--baseline", "static"]
        return ["plan", *given, "--output", target, "--overwrite"]

    def reporting(self, target: Path) -> list[Any]:
        """The command that saves a page about a run."""
        return ["report", self.whole, "--output", target]

    def killed_run(self, name: str, kills: int, rng: random.Random, *, forked: bool) -> Tally:
        """One run to its end, killed at most so often on its way."""
        tally, folder = Tally(), self.path / name
        step_s = self.seconds["train"] / self.steps
        for number in range(min(kills, KILLS_OF_RUN) + 1):
            resume = ["--resume"] if (folder / "config.json").exists() else []
            arguments = ["train", self.train, "--folder", folder, *resume]
            command = Command(arguments, self.path / f"{name}-{number}.log", forked=forked)
            sent = None
            if number < min(kills, KILLS_OF_RUN):
                if rng.random() < 0.8:
                    reach = _recorded(folder) + rng.randint(1, 4)
                    while command.alive and _recorded(folder) < reach:
                        time.sleep(0.005)
                    sent = command.kill_after(rng.uniform(0, step_s), rng)
                else:
                    sent = command.kill_after(rng.uniform(0, 2 * self.seconds["train"] / 5), rng)
            code = command.wait()
            self._ended(tally, name, command, code, sent)
            _look(tally, name, lambda: _read_run(folder))
            if code == 0 and sent is not None and _recorded(folder):
                steps = [int(match[1]) for p in (folder / "checkpoints").iterdir() if (match := NAME.fullmatch(p.name))]
                tally.without_checkpoint += max(steps) < _recorded(folder)
            if sent is None:
                break
        tally.same.append(_same_run(folder, self.whole))
        tally.tripped += [f"{name}: {path} is left" for path in _names(folder) ^ _names(self.whole)]
        shutil.rmtree(folder)
        return tally

    def convert(self, name: str, kills: int, rng: random.Random) -> Tally:
        """Saving a trace, killed; and then not."""
        target = self.path / name / "trace.safetensors"

        def content() -> Any:
            return flips.of_trace(load(target)) if target.exists() else None

        expected = flips.of_trace(load(self.path / "converted"))
        tally = self._killed(name, "convert", self.converting(target), content, kills, rng, expected=expected)
        tally.tripped += [f"{name}: {path} is left" for path in _names(target.parent) ^ {"trace.safetensors"}]
        return tally

    def plan(self, name: str, kills: int, rng: random.Random) -> Tally:
        """Planning, killed; and then not."""
        folder = self.path / name
        target, page, planned = folder / "plan.safetensors", folder / "plan.html", self.path / "planned"

        def content() -> Any:
            if page.exists() and not page.read_text(encoding="utf-8").rstrip().endswith("</html>"):
                raise ForerouteError(f"{page} is half written")
            return flips.plain_fields(load_plan(target)) if target.exists() else None

        expected = flips.plain_fields(load_plan(planned / "plan.safetensors"))
        tally = self._killed(name, "plan", self.planning(target), content, kills, rng, expected=expected)
        tally.tripped += [f"{name}: {path} is left" for path in _names(folder) ^ {"plan.safetensors", "plan.html"}]
        return tally

    def report(self, name: str, kills: int, rng: random.Random) -> Tally:
        """Reporting, killed; and then not."""
        target = self.path / name / "page.html"

        def content() -> Any:
            return target.read_text(encoding="utf-8") if target.exists() else None

        expected = (self.path / "planned" / "page.html").read_text(encoding="utf-8")
        tally = self._killed(name, "report", self.reporting(target), content, kills, rng, expected=expected)
        tally.tripped += [f"{name}: {path} is left" for path in _names(target.parent) ^ {"page.html"}]
        return tally

    def _killed(
        self,
        name: str,
        verb: str,
        arguments: Sequence[Any],
        content: Callable[[], Any],
        kills: int,
        rng: random.Random,
        *,
        expected: Any,
    ) -> Tally:
        """A command that is killed and given again. What is there in between is whole, or not there."""
        tally = Tally()
        (self.path / name).mkdir()
        kills = min(kills, KILLS_OF_OTHER)
        for number in range(kills + 1):
            began = time.monotonic()
            command, sent = Command(arguments, self.path / f"{name}-{number}.log"), None
            if number < kills:
                # more often towards the end, where files are written
                sent = command.kill_after(self.seconds[verb] * rng.random() ** 0.5, rng)
            code = command.wait()
            if sent is None:
                # the machine is faster, or less busy, than it was
                self.seconds[verb] = min(self.seconds[verb], time.monotonic() - began)
            self._ended(tally, name, command, code, sent)
            if (seen := _look(tally, name, content)) is not None:
                tally.same.append(seen == expected)
            if verb == "convert" and number < kills:
                (self.path / name / "trace.safetensors").unlink(missing_ok=True)
        return tally

    def _ended(self, tally: Tally, name: str, command: Command, code: int, sent: signal.Signals | None) -> None:
        printed = command.printed()
        if "Traceback" in printed:
            tally.tracebacks.append(f"{name}: {printed}")
        if sent is None:
            if code != 0:
                tally.tripped.append(f"{name}: exit code {code}: {printed}")
            return
        tally.kills += 1
        if code not in (0, -sent, 128 + sent):
            tally.tripped.append(f"{name}: exit code {code} after {sent.name}: {printed}")

    def flipped(self, number: int, seed: int) -> dict[str, flips.Found]:
        """Flip bits in copies of everything."""
        config = parse_config(self.values, source="benchmarks/kills.py")
        run = flips.copied(self.whole, self.path / "flipped")
        others = {name: getattr(self, name) for name in ("trace", "counts", "train", "topology", "simulate")}
        others["plan"] = self.path / "planned" / "plan.safetensors"
        return flips.flipped(flips.kinds_of(run, config, others), number, seed)


class Command:
    """`foreroute ARGUMENTS` in a process of its own.

    Args:
        arguments: of the command.
        log: what it prints.
        forked: from one that has imported everything; or else started anew.
    """

    def __init__(self, arguments: Sequence[Any], log: Path, *, forked: bool = True) -> None:
        self._log, words = log, [str(each) for each in arguments]
        self._process: Process
        if forked:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["benchmarks.kills", *(f"foreroute.{name}" for name in PRELOADED)])
            self._process = context.Process(target=_command, args=(words, str(log)))
            self._process.start()
        else:
            with open(log, "wb") as file:
                command = [sys.executable, "-m", "foreroute.cli", *words]
                self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._code() is None

    def kill_after(self, seconds: float, rng: random.Random) -> signal.Signals | None:
        """Send one of the signals after so long; which, or None when it had ended by itself."""
        end = time.monotonic() + seconds
        while self.alive and time.monotonic() < end:
            time.sleep(0.002)
        number = rng.choice(SIGNALS)
        if not self.alive:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)
        return number

    def wait(self) -> int:
        """Its exit code, below 0 for a signal."""
        end = time.monotonic() + PATIENCE_S
        while (code := self._code()) is None:
            if time.monotonic() > end:
                self._process.kill()
                raise RuntimeError(f"a command hangs: {self.printed()}")
            time.sleep(0.005)
        return code

    def printed(self) -> str:
        """Everything."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def _code(self) -> int | None:
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        code: int | None = self._process.exitcode
        return code


def _killed_often(task: Callable[[str, int, random.Random], Tally], name: str, kills: int, rng: random.Random) -> Tally:
    """A task again and again, until it was killed so often; some end before they can be."""
    tally = Tally()
    for number in range(3 * kills):
        if tally.kills >= kills:
            break
        tally.add(task(f"{name}-{number}", kills - tally.kills, rng))
    return tally


def _command(arguments: list[str], log: str) -> None:
    """In the forked process: what a shell and the interpreter do before the command line runs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["foreroute", *arguments]
    command_line()


def _recorded(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _look(tally: Tally, name: str, read: Callable[[], Any]) -> Any:
    """What a reader makes of what a kill left."""
    try:
        return read()
    except Exception as error:
        kind = tally.tripped if isinstance(error, ForerouteError) else tally.tracebacks
        kind.append(f"{name}: {type(error).__name__}: {error}")
        return None


def _read_run(folder: Path) -> None:
    """Everything that is in a run's folder, as its readers read it, finished or not."""
    if _recorded(folder):
        read_runs([folder])
    for path in sorted(folder.glob("checkpoints/*")):
        if NAME.fullmatch(path.name):
            load_checkpoint(path)
    for path in sorted(folder.glob("rollouts/step-??????.safetensors")):
        load_generation(path)
    for path in sorted(folder.glob("model/*.safetensors")):
        TensorFile(path, ForerouteError).close()  # type: ignore[arg-type]


def _same_run(folder: Path, whole: Path) -> bool:
    if not (folder / "model").exists() or _records(folder) != _records(whole):
        return False
    last = [RunFolder(each).last_checkpoint() for each in (folder, whole)]
    if last[0] is None or last[1] is None or not same_state(load_checkpoint(last[0]), load_checkpoint(last[1])):
        return False
    return all(
        flips.of_generation(load_generation(folder / "rollouts" / path.name))
        == flips.of_generation(load_generation(path))
        for path in sorted(whole.glob("rollouts/step-??????.safetensors"))
    )


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
