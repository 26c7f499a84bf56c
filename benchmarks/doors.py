"""Every verb of the command line against inputs, outputs and streams that are not what they should be.

Each case is a process of its own, forked from one that has loaded everything. It must end in time with exit code 0, 1
or 2, without a traceback, with a message where the code is not 0, and print nothing that a terminal obeys; what was
there before must be there afterwards. What cannot work must be refused (2). Kernels run as plain Python.

    metrics.cases              how many
    metrics.tracebacks         of those, that printed one
    metrics.hangs              that had to be killed
    metrics.bad_exit_codes     that ended with another code than one that is right for the case
    metrics.raw_bytes          that printed control characters, marks of direction, or no UTF-8
    metrics.silent             that failed without a message, where one can be printed
    metrics.destroyed          that changed, replaced or removed a file, or left a temporary one behind
"""

from __future__ import annotations

import copy
import gc
import hashlib
import importlib
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreroute.errors import printable

DEADLINE_S = 30.0
AT_ONCE = 2
QUICK_CASES = 80
NOBODY = 65534
MOST_BYTES_MORE = 1 << 30
"""Of memory, than what is loaded: a case that reads a device to its end shall not take the machine with it."""
LEFT_BEHIND = re.compile(r"\.[0-9a-f]{8}$")
HOSTILE = "\x1b]0;m\x07\x1b[2J\u202e\x9b1m\N{RIGHT-TO-LEFT ISOLATE}"
NOT_UTF8 = os.fsdecode(b"n\xff\xc3(")

INPUTS = (
    ("inspect", "trace", "trace.safetensors", "inspect @"),
    ("validate", "traces", "trace.safetensors", "validate @"),
    ("convert", "source, a trace", "trace.safetensors", "convert @ out --to ordered"),
    ("convert", "source, an answer", "answer.json", "convert @ out {trace}"),
    ("convert", "--model, a folder", "model", "convert {good}/answer.json out --model @"),
    ("convert", "--model, a trace", "trace.safetensors", "convert {good}/answer.json out --model @"),
    ("convert", "--tokens", "tokens.json", "convert {good}/no-tokens.json out {trace} --tokens @"),
    ("diff", "reference", "trace.safetensors", "diff @ {good}/trace.safetensors"),
    ("diff", "other", "trace.safetensors", "diff {good}/trace.safetensors @"),
    ("doctor", "--model, a folder", "model", "doctor --model @ --generation {good}/generation.safetensors"),
    ("doctor", "--model, a TOML", "train.toml", "doctor --model @ --trace {good}/run/traces/step-000000.safetensors"),
    (
        "doctor",
        "--checkpoint",
        "run/checkpoints/step-000001.safetensors",
        "doctor --model {good}/train.toml --trace {good}/run/traces/step-000000.safetensors --checkpoint @",
    ),
    ("doctor", "--generation", "generation.safetensors", "doctor --model {good}/model --generation @"),
    ("doctor", "--trace", "engine.safetensors", "doctor --model {good}/model --trace @"),
    ("doctor", "--logprobs", "logprobs.npy", "doctor {engine} --prompt-lengths {good}/prompts.npy --logprobs @"),
    ("doctor", "--prompt-lengths", "prompts.npy", "doctor {engine} --logprobs {good}/logprobs.npy --prompt-lengths @"),
    ("doctor", "--trainer-trace", "engine.safetensors", "doctor --trace {good}/engine.safetensors --trainer-trace @"),
    ("doctor", "--trainer-logprobs", "logprobs.npy", "doctor --logprobs {good}/logprobs.npy --trainer-logprobs @"),
    (
        "doctor",
        "--replayed-logprobs",
        "logprobs.npy",
        "doctor --logprobs {good}/logprobs.npy --trainer-logprobs {good}/logprobs.npy --replayed-logprobs @",
    ),
    ("plan", "--topology", "cluster.toml", "plan --counts {good}/counts.safetensors {few} --topology @"),
    ("plan", "traces", "trace.safetensors", "plan @ --topology {good}/cluster.toml {few}"),
    ("plan", "--counts", "counts.safetensors", "plan --topology {good}/cluster.toml {few} --counts @"),
    ("plan", "--previous-plan", "plan.safetensors", "plan {step} {few} --previous-plan @"),
    ("plan", "--previous-step, counts", "counts.safetensors", "plan {step} {few} --previous-step @"),
    ("plan", "--previous-step, a trace", "trace.safetensors", "plan {step} {few} --previous-step @"),
    ("simulate", "config", "simulate.toml", "simulate @ --output out"),
    ("simulate", "--fit", "measured.jsonl", "simulate {good}/simulate.toml --output out --rate layer_s --fit @"),
    ("report", "runs", "run", "report @ --output out.html"),
    ("report", "runs, the second", "run", "report {good}/run @ --output out.html"),
    ("train", "config", "train.toml", "train @ --folder out"),
    ("train", "--folder, with --resume", "run", "train {good}/train.toml --resume --folder @"),
)
"""Verb, argument, what is valid for it, and the command line: @ is the argument."""
OUTPUTS = (
    ("convert", "target", "file", "convert {good}/trace.safetensors @ --to ordered"),
    ("plan", "--output", "file", "plan {step} --no-baselines --output @"),
    ("doctor", "--output", "file", "doctor {passes} --output @"),
    ("report", "--output", "file", "report {good}/run --output @"),
    ("simulate", "--output", "folder", "simulate {good}/simulate.toml --output @"),
    ("train", "--folder", "folder", "train {good}/train.toml --folder @"),
    ("demo", "--folder", "folder", "demo --steps 1 --folder @"),
    ("demo-ep", "--folder", "folder", "demo-ep --steps 1 --folder @"),
)  # fmt: skip
PARTS = {
    "{passes}": "--trace {good}/engine.safetensors --trainer-trace {good}/engine.safetensors",
    "{trace}": "--model {good}/trace.safetensors",
    "{few}": "--no-baselines",
    "{step}": "--topology {good}/cluster.toml --counts {good}/counts.safetensors",
    "{engine}": "--model {good}/model --trace {good}/engine.safetensors",
}
WRONG = {"run": "model", ".toml": "trace.safetensors"}
"""By name or suffix of what is right."""
BESIDE = {"generation.safetensors": "generation*.trace.safetensors", "measured.jsonl": "counts.safetensors"}
"""Files that name another one beside them."""
REFUSED, FINE, ANY = frozenset({2}), frozenset({0, 1}), frozenset({0, 1, 2})


@dataclass
class Case:
    """One process.

    Attributes:
        verb: of the command line.
        door: the argument or stream.
        condition: what is wrong with it.
        words: the command line, where @ is the argument.
        codes: exit codes that are right.
        given: the argument; relative to the case's folder.
        valid: what would be right, in the folder of valid files; empty for outputs.
        may_change: a folder that is there to be changed.
        unprivileged: whether it runs as nobody, for whom modes of files count.
        no_space: whether it can write nothing into a file.
        streams: of standard input, output and error, what is not as usual: closed, full, or cut (nobody reads).
        environment: what is set.
    """

    verb: str
    door: str
    condition: str
    words: str
    codes: frozenset[int]
    given: str = ""
    valid: str = ""
    may_change: str = ""
    unprivileged: bool = False
    no_space: bool = False
    streams: tuple[str, str, str] = ("", "", "")
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.verb}, {self.door}: {self.condition}"


@dataclass
class Result:
    """What became of a case."""

    case: Case
    code: int
    stdout: bytes
    stderr: bytes
    seconds: float
    hung: bool
    destroyed: list[str]


MUST_BE = dict.fromkeys(("tracebacks", "hangs", "bad_exit_codes", "raw_bytes", "silent", "destroyed"), 0)
"""Metrics of a run in which all is well."""


def run(quick: bool) -> dict[str, Any]:
    """The whole matrix; when quick, a fixed sample of it."""
    return judged(tried(most=QUICK_CASES if quick else None))


def judged(results: Sequence[Result]) -> dict[str, Any]:
    """Counts, and the cases behind them by name."""
    failures: dict[str, list[str]] = {
        "tracebacks": [r.case.name for r in results if b"Traceback (most recent" in r.stdout + r.stderr],
        "hangs": [r.case.name for r in results if r.hung],
        "bad_exit_codes": [f"{r.case.name} ({r.code})" for r in results if not r.hung and r.code not in r.case.codes],
        "raw_bytes": [r.case.name for r in results if _raw(r.stdout) or _raw(r.stderr)],
        "silent": [r.case.name for r in results if r.code != 0 and not r.hung and _is_silent(r)],
        "destroyed": [f"{r.case.name} ({', '.join(r.destroyed)})" for r in results if r.destroyed],
    }
    metrics = {"cases": len(results), **{name: len(found) for name, found in failures.items()}}
    slowest = max((r.seconds for r in results), default=0.0)
    return {"metrics": metrics, "baselines": {}, "failures": failures, "slowest_s": round(slowest, 1)}


def tried(*, most: int | None = None, verbs: Sequence[str] = ()) -> list[Result]:
    """Load everything, write the valid files, and run the cases.

    Args:
        most: a fixed sample of about this many cases; all when left out.
        verbs: these alone; all when empty.
    """
    os.environ |= {"NUMBA_DISABLE_JIT": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    from benchmarks.harness.doors_files import write_files

    light = bool(verbs) and not {"train", "doctor", "report", "demo", "demo-ep"} & set(verbs)
    cases = [case for case in matrix() if not verbs or case.verb in verbs]
    if most is not None:
        cases = cases[:: max(1, len(cases) // most)]
    with tempfile.TemporaryDirectory(prefix="doors-") as name:
        base = Path(name)
        base.chmod(0o755)
        good = base / "good"
        good.mkdir()
        write_files(good, light=light)
        _load_everything(light)
        before = _contents(good)
        results = _all(cases, base, good)
        changed = _differences(before, _contents(good))
        assert not changed, f"a case changed the files of all: {changed}"
    return results


def matrix() -> Iterator[Case]:
    """Every verb, every argument and stream, every condition."""
    for verb, door, kind, words in INPUTS:
        yield from _inputs(verb, door, words, kind)
    for verb, door, kind, words in OUTPUTS:
        yield from _outputs(verb, door, words, kind)
    usual = {verb: (words, kind) for verb, _, kind, words in (*INPUTS[::-1], *OUTPUTS[::-1])}
    for verb, (words, kind) in usual.items():
        given = "new" if kind in ("file", "folder") else f"{{good}}/{kind}"
        yield from _streams(verb, words, given)


def _inputs(verb: str, door: str, words: str, valid: str) -> Iterator[Case]:
    suffix = Path(valid).suffix

    def case(condition: str, codes: frozenset[int] = REFUSED, given: str = f"given{suffix}", **more: Any) -> Case:
        may_change = given if "--resume" in words and condition.startswith("valid") else ""
        return Case(verb, door, condition, words, codes, given, valid, may_change, **more)

    yield case("missing", given=f"missing{suffix}")
    yield case("missing, hostile name", given=f"{HOSTILE}{suffix}")
    yield case("missing, name not UTF-8", given=f"{NOT_UTF8}{suffix}")
    yield case("below a file", given=f"there.txt/given{suffix}")
    yield case("name too long", given="x" * 300 + suffix)
    for condition in (
        "empty",
        "text",
        "wrong kind",
        "truncated",
        "FIFO",
        "directory",
        "dangling link",
        "link to itself",
    ):
        yield case(condition)
    yield case("socket")
    for device in ("zero", "full", "null"):
        yield case(f"device {device}", given=f"/dev/{device}")
    yield case("link to a device")
    yield case("unreadable", unprivileged=True)
    yield case("below an unreadable folder", given=f"private/given{suffix}", unprivileged=True)
    yield case("valid", FINE)
    yield case("valid, hostile name", FINE, given=f"{HOSTILE}{suffix}")
    # the safetensors library, which reads weights, takes no such name
    codes = REFUSED if verb == "doctor" and valid == "model" else FINE
    yield case("valid, name not UTF-8", codes, given=f"{NOT_UTF8}{suffix}")


def _outputs(verb: str, door: str, words: str, kind: str) -> Iterator[Case]:
    suffix = {"plan": ".safetensors", "report": ".html", "doctor": ".html"}.get(verb, "")
    fine = REFUSED if verb == "demo-ep" else FINE  # without torchrun there is nothing to do

    def case(condition: str, codes: frozenset[int] = REFUSED, given: str = f"given{suffix}", **more: Any) -> Case:
        return Case(verb, door, condition, words, codes, given, **more)

    yield case("new", fine, given=f"new{suffix}")
    yield case("new, in new folders", fine, given=f"a/b/new{suffix}")
    yield case("new, hostile name", fine, given=f"{HOSTILE}{suffix}")
    # the second run's configuration names the first one's folder, as text
    yield case("new, name not UTF-8", REFUSED if verb == "demo" else fine, given=f"{NOT_UTF8}{suffix}")
    yield case("text", given="there.txt")
    yield case("wrong kind", given="other.safetensors" if suffix != ".safetensors" else "there.txt")
    yield case("FIFO")
    yield case("socket")
    yield case(
        "directory" if kind == "file" else "directory with files", FINE if verb == "demo" else REFUSED, given="folder"
    )
    yield case("dangling link", ANY)
    yield case("dangling link into nowhere", ANY)
    yield case("link to itself")
    yield case("link to a text")
    yield case("below a file", given=f"there.txt/given{suffix}")
    yield case("name too long", given="x" * 300 + suffix)
    for device in ("zero", "full", "null"):
        yield case(f"device {device}", given=f"own-{device}")  # what is given may be replaced, if there is a bug
    yield case("folder that is not writable", unprivileged=True, given=f"new{suffix}")
    yield case("below a private folder", unprivileged=True, given=f"private/new{suffix}")
    yield case("no space", given=f"new{suffix}", no_space=True)


def _streams(verb: str, words: str, given: str) -> Iterator[Case]:
    fine = REFUSED if verb == "demo-ep" else FINE
    closed, full, cut = "closed", "full", "cut"
    for condition, codes, streams in (
        ("closed stdin", fine, (closed, "", "")),
        ("closed stdout", REFUSED, ("", closed, "")),
        ("closed stderr", fine, ("", "", closed)),
        ("all closed", REFUSED, (closed, closed, closed)),
        ("full stdout", REFUSED, ("", full, "")),
        ("full stderr", fine, ("", "", full)),
        ("nobody reads stdout", REFUSED, ("", cut, "")),
    ):
        yield Case(verb, "streams", condition, words, codes, given, streams=streams)
    for columns in ("0", "1", "-1", "9" * 9, "\N{SUPERSCRIPT TWO}", NOT_UTF8):
        name = f"COLUMNS is {columns.encode(errors='backslashreplace').decode()}"
        yield Case(verb, "terminal", name, words, fine, given, environment={"COLUMNS": columns})
    yield Case(verb, "terminal", "ASCII", words, fine, given, environment={"PYTHONIOENCODING": "ascii"})
    yield Case(verb, "options", "unknown, hostile", f"{verb} --{HOSTILE}", REFUSED)
    yield Case(verb, "options", "unknown, not UTF-8", f"{verb} --{NOT_UTF8}", REFUSED)


def _prepare(case: Case, here: Path, good: Path) -> None:
    """Put into the folder of a case what is there before it, and what the argument names."""
    here.mkdir()
    (here / "there.txt").write_text("mine\n")
    (here / "folder").mkdir()
    (here / "folder" / "mine.txt").write_text("mine\n")
    shutil.copy(good / "trace.safetensors", here / "other.safetensors")
    (here / "private").mkdir()
    given = here / case.given
    valid = good / case.valid if case.valid else None
    _make(case.condition, given, here, valid)
    if case.given.startswith("private/") and valid:
        _copy(valid, given)
    if case.condition == "unreadable":
        given.chmod(0)
    if case.condition == "folder that is not writable":
        here.chmod(0o555)
    (here / "private").chmod(0)


def _make(condition: str, given: Path, here: Path, valid: Path | None) -> None:
    """What the argument names, where that is not there already."""
    links = {
        "dangling link": here / "nothing",
        "dangling link into nowhere": here / "no" / "where",
        "link to itself": given,
        "link to a device": Path("/dev/zero"),
        "link to a text": here / "there.txt",
    }
    if condition in links:
        given.symlink_to(links[condition])
    elif condition == "FIFO":
        os.mkfifo(given)
    elif condition.startswith("device ") and valid is None:
        try:
            os.mknod(given, stat.S_IFCHR | 0o666, os.stat(f"/dev/{condition.split()[1]}").st_rdev)
        except PermissionError:
            os.mkfifo(given)
    elif condition == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(given))
    elif valid is None:
        return
    elif condition in ("valid", "valid, hostile name", "valid, name not UTF-8", "unreadable"):
        _copy(valid, given)
    elif condition == "directory" or (condition == "empty" and valid.is_dir()):
        given.mkdir()
        if condition == "directory":
            (given / "mine.txt").write_text("mine\n")
    elif condition in ("empty", "text"):
        given.write_text("" if condition == "empty" else "not what you expect\n")
    elif condition == "wrong kind":
        _copy(here.parent / "good" / WRONG.get(valid.name, WRONG.get(valid.suffix, "cluster.toml")), given)
    elif condition == "truncated":
        _copy(valid, given)
        for path in [given] if given.is_file() else [path for path in given.iterdir() if path.is_file()]:
            data = path.read_bytes()
            # a TOML that ends between two keys is another valid one
            path.write_bytes(data[: data.rindex(b"[") + 1] if path.suffix == ".toml" else data[: len(data) * 6 // 10])


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
        return
    shutil.copy(source, target)
    for beside in source.parent.glob(BESIDE[source.name]) if source.name in BESIDE else ():
        shutil.copy(beside, target.with_name(beside.name))


def _command(case: Case, good: Path) -> list[str]:
    words = case.words
    for part, text in PARTS.items():
        words = words.replace(part, text)
    filled = [word.replace("@", case.given) for word in words.split(" ")]
    return [word.replace("{good}", str(good)) for word in filled]


def _all(cases: Sequence[Case], base: Path, good: Path) -> list[Result]:
    """Run the cases, some at once."""
    waiting, results = list(enumerate(cases))[::-1], []
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, case = waiting.pop()
            here = base / f"case{number}"
            _prepare(case, here, good)
            running.append(_Running(case, here, good))
        ready, _, _ = select.select([fd for process in running for fd in process.pipes], [], [], 0.05)
        for process in list(running):
            process.read(ready)
            if process.has_ended():
                running.remove(process)
                results.append(process.result())
                shutil.rmtree(process.here)
    return results


class _Running:
    """A case that runs."""

    def __init__(self, case: Case, here: Path, good: Path) -> None:
        self.case, self.here = case, here
        self._before = _contents(here)
        outputs = [os.pipe(), os.pipe()]
        sys.stdout.flush()
        self._begun = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            _child(case, here, good, [write for _, write in outputs])
        for _, write in outputs:
            os.close(write)
        self.pipes = {read: bytearray() for read, _ in outputs}
        self._read = [read for read, _ in outputs]
        self._texts = list(self.pipes.values())
        self._status: int | None = None
        self._hung = False

    def read(self, ready: Sequence[int]) -> None:
        """Take what it has printed."""
        for pipe in [pipe for pipe in ready if pipe in self.pipes]:
            data = os.read(pipe, 1 << 16)
            self.pipes[pipe] += data
            if not data:
                os.close(pipe)
                del self.pipes[pipe]

    def has_ended(self) -> bool:
        """Whether it is over; after the deadline it is."""
        if self._status is None:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._status = status
            elif time.monotonic() - self._begun > DEADLINE_S:
                self._hung = True
                os.killpg(self._pid, signal.SIGKILL)
                self._status = os.waitpid(self._pid, 0)[1]
        if self._status is not None and self.pipes:
            with suppress(ProcessLookupError):  # processes that it started and left behind hold the pipes open
                os.killpg(self._pid, signal.SIGKILL)
        return self._status is not None and not self.pipes

    def result(self) -> Result:
        """What became of it."""
        assert self._status is not None, "asked before it ended"
        stdout, stderr = (bytes(text) for text in self._texts)
        for path in (self.here, self.here / "private"):
            path.chmod(0o755)
        code = os.waitstatus_to_exitcode(self._status)
        destroyed = _differences(self._before, _contents(self.here), may_change=self.case.may_change)
        return Result(self.case, code, stdout, stderr, time.monotonic() - self._begun, self._hung, destroyed)


def _child(case: Case, here: Path, good: Path, outputs: Sequence[int]) -> None:
    """The process of a case, from the fork to the exit of an interpreter."""
    code = 1
    try:
        os.setsid()
        _arrange_streams(case, outputs)
        os.environ.update(case.environment, HOME=str(here))
        os.chdir(here)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES_MORE, size + MOST_BYTES_MORE))
        if case.no_space:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        if case.unprivileged and os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        warnings.simplefilter("ignore")  # whole numbers overflow on purpose in kernels that are not compiled
        sys.argv = ["foreroute", *_command(case, good)]
        from foreroute.cli.main import main

        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]  # what an interpreter does at its end
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except OSError:
                code = 120
    finally:
        os._exit(code)


def _arrange_streams(case: Case, outputs: Sequence[int]) -> None:
    """As a shell would have started it, and as an interpreter would have opened them."""
    ends: list[int | None] = []
    for how, usual in zip(case.streams, (os.open(os.devnull, os.O_RDONLY), *outputs), strict=True):
        if how == "full":
            ends.append(os.open("/dev/full", os.O_WRONLY))
        elif how == "cut":
            read, write = os.pipe()
            os.close(read)
            ends.append(write)
        else:
            ends.append(None if how == "closed" else usual)
    for number, end in enumerate(ends):
        if end is not None:
            os.dup2(end, number)
    for number, end in enumerate(ends):
        if end is None:
            os.close(number)
    os.closerange(3, 4096)
    encoding = case.environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdin, sys.stdout, sys.stderr = (
        None if end is None else open(number, mode, encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
        for number, (end, mode, errors) in enumerate(
            zip(ends, ("r", "w", "w"), ("surrogateescape", "strict", "backslashreplace"), strict=True)
        )
    )


def _load_everything(light: bool) -> None:
    """What verbs import when they run, so that each case need not."""
    names = ["convert", "plan", "plan_inputs", "simulate", "terminal", "traces"]
    names += [] if light else ["demo", "doctor", "doctor_inputs", "train"]
    for name in names:
        importlib.import_module(f"foreroute.cli.{name}")
    if not light:
        importlib.import_module("foreroute.doctor.examine")
    for name in ("plan_plots", "simulation_plots", "sweep_plots", "run_plots", "diagnosis_plots"):
        importlib.import_module(f"foreroute.report.{name}")
    importlib.import_module("jinja2")
    if not light:
        _shorten_the_demo()
    gc.freeze()


def _shorten_the_demo() -> None:
    """Its warm start takes minutes."""
    from foreroute.cli import demo

    values = demo.demo_values()
    values["warm_start"]["max_steps"] = 1
    values["rollout"] |= {"prompts": 2, "group_size": 2}
    demo.demo_values = lambda: copy.deepcopy(values)


def _contents(folder: Path) -> dict[str, str]:
    """Everything below a folder: its kind, and what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        what = os.readlink(path) if stat.S_ISLNK(mode) else ""
        if stat.S_ISREG(mode) and os.access(path, os.R_OK):
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = f"{stat.S_IFMT(mode):o} {what}"
    return found


def _differences(before: dict[str, str], after: dict[str, str], *, may_change: str = "") -> list[str]:
    """What is gone, is another, or was left behind; names for people."""
    names = [name for name, what in before.items() if after.get(name) != what]
    names += [name for name in after.keys() - before.keys() if LEFT_BEHIND.search(name)]
    return [ascii(name) for name in names if not (may_change and name.startswith(f"{may_change}/"))]


def _raw(output: bytes) -> bool:
    """Whether something in it is obeyed by a terminal, or is no text."""
    try:
        text = output.decode()
    except UnicodeDecodeError:
        return True
    return printable(text) != text


def _is_silent(result: Result) -> bool:
    """Whether it failed without a word, although somebody listens."""
    heard = result.stderr + (result.stdout if result.case.verb in ("validate", "doctor", "diff") else b"")
    return not heard.strip() and not any(result.case.streams)
