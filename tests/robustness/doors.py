"""Runs verbs of the command line against inputs, outputs and streams that are not what they should be.

Each case is a process of its own, forked from one that has loaded everything. It must end in time with exit code 0, 1
or 2, without a traceback, with a message where the code is not 0, and print nothing that a terminal obeys; what was
there before must be there afterwards. What cannot work must be refused (2). Kernels run as plain Python.
"""

import gc
import hashlib
import importlib
import logging
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foreroute.errors import printable
from tests.robustness.doors_cases import PARTS, Case, matrix
from tests.robustness.doors_files import write_files

DEADLINE_S = 30.0
NOBODY = 65534
MOST_BYTES_MORE = 1 << 30
"""Of memory, than what is loaded: a case that reads a device to its end shall not take the machine with it."""
LEFT_BEHIND = re.compile(r"\.[0-9a-f]{8}$")
WRONG = {"run": "model", ".toml": "trace.safetensors"}
"""By name or suffix of what is right."""
BESIDE = {"measured.jsonl": "counts.safetensors"}
"""Files that name another one beside them."""


@dataclass
class Result:
    case: Case
    code: int
    stdout: bytes
    stderr: bytes
    hung: bool
    destroyed: list


def try_cases(most):
    """A sample of about so many cases, 0 for all: their number, and the names of those that failed, by kind."""
    cases = list(matrix())
    cases = cases[:: max(1, len(cases) // most)] if most else cases
    with tempfile.TemporaryDirectory(prefix="doors-") as name:
        base, good = Path(name), Path(name) / "good"
        base.chmod(0o755)
        good.mkdir()
        write_files(good)
        _load_everything()
        before = _contents(good)
        results = [run(case, base / f"case{number}", good) for number, case in enumerate(cases)]
        changed = _differences(before, _contents(good))
    return len(results), {**judged(results), "files of all changed": changed}


def judged(results):
    """Names of the cases behind each kind of failure."""
    return {
        "tracebacks": [r.case.name for r in results if b"Traceback (most recent" in r.stdout + r.stderr],
        "hangs": [r.case.name for r in results if r.hung],
        "wrong exit codes": [f"{r.case.name} ({r.code})" for r in results if not r.hung and r.code not in r.case.codes],
        "raw bytes": [r.case.name for r in results if _raw(r.stdout) or _raw(r.stderr)],
        "silent": [r.case.name for r in results if r.code != 0 and not r.hung and _is_silent(r)],
        "destroyed": [f"{r.case.name} ({', '.join(r.destroyed)})" for r in results if r.destroyed],
    }


def run(case, here, good):
    """Try one case, in a folder of its own that is made for it and removed."""
    _prepare(case, here, good)
    before = _contents(here)
    outputs = [os.pipe(), os.pipe()]
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _child(case, here, good, [write for _, write in outputs])
    texts, ended, hung = [bytearray(), bytearray()], os.pidfd_open(pid), False
    open_ends = {ended: None, **{read: text for (read, _), text in zip(outputs, texts, strict=True)}}
    for _, write in outputs:
        os.close(write)
    deadline = time.monotonic() + DEADLINE_S
    while open_ends:
        ready, _, _ = select.select(list(open_ends), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            if hung:  # what still holds the pipes is no child of ours
                break
            hung, deadline = True, time.monotonic() + DEADLINE_S
        for end in ready:
            data = b"" if end == ended else os.read(end, 1 << 16)
            if data:
                open_ends[end] += data
            else:
                os.close(end)
                del open_ends[end]
        if hung:
            os.kill(pid, signal.SIGKILL)  # it may be the leader of no group yet
        if hung or ended not in open_ends:
            with suppress(ProcessLookupError):  # processes that it started and left behind hold the pipes open
                os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for path in (here, here / "private"):
        path.chmod(0o755)
    destroyed = _differences(before, _contents(here), may_change=case.may_change)
    shutil.rmtree(here)
    return Result(case, code, *map(bytes, texts), hung, destroyed)


def _prepare(case, here, good):
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


def _make(condition, given, here, valid):
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


def _copy(source, target):
    if source.is_dir():
        shutil.copytree(source, target)
        return
    shutil.copy(source, target)
    for beside in source.parent.glob(BESIDE[source.name]) if source.name in BESIDE else ():
        shutil.copy(beside, target.with_name(beside.name))


def _command(case, good):
    words = case.words
    for part, text in PARTS.items():
        words = words.replace(part, text)
    filled = [word.replace("@", case.given) for word in words.split(" ")]
    return [word.replace("{good}", str(good)) for word in filled]


def _child(case, here, good, outputs):
    """The process of a case, from the fork to the exit of an interpreter."""
    code = 1
    try:
        os.setsid()
        gc.freeze()  # what pytest's process has left is not collected here, where its files are closed
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
        # as an interpreter has them, not as pytest does
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        logging.getLogger().handlers.clear()
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


def _arrange_streams(case, outputs):
    """As a shell would have started it, and as an interpreter would have opened them."""
    ends = []
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


def _load_everything():
    """What verbs import when they run, so that each case need not."""
    for name in ("convert", "demo", "doctor", "plan", "simulate", "terminal", "traces", "train"):
        importlib.import_module(f"foreroute.cli.{name}")
    importlib.import_module("foreroute.adapters.checkpoint")  # torch does not load within the memory of a case
    importlib.import_module("foreroute.doctor.examine")
    for name in ("plan", "simulation", "run_plots", "diagnosis_plots"):
        importlib.import_module(f"foreroute.report.{name}")
    for name in ("jinja2", "matplotlib.backends.backend_svg", "matplotlib.colors", "matplotlib.ticker"):
        importlib.import_module(name)


def _contents(folder):
    """Everything below a folder: its kind, and what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        what = os.readlink(path) if stat.S_ISLNK(mode) else ""
        if stat.S_ISREG(mode) and os.access(path, os.R_OK):
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = f"{stat.S_IFMT(mode):o} {what}"
    return found


def _differences(before, after, *, may_change=""):
    """What is gone, is another, or was left behind; names for people."""
    names = [name for name, what in before.items() if after.get(name) != what]
    names += [name for name in after.keys() - before.keys() if LEFT_BEHIND.search(name)]
    return [ascii(name) for name in names if not (may_change and name.startswith(f"{may_change}/"))]


def _raw(output):
    """Whether something in it is obeyed by a terminal, or is no text."""
    try:
        text = output.decode()
    except UnicodeDecodeError:
        return True
    return printable(text) != text


def _is_silent(result):
    """Whether it failed without a word, although somebody listens."""
    heard = result.stderr + (result.stdout if result.case.verb in ("validate", "doctor", "diff") else b"")
    return not heard.strip() and not any(result.case.streams)
