"""No input, output or stream breaks a verb of the command line.

Each case is a process of its own, forked from one that has loaded everything. What cannot work must be refused (2).
"""

import fcntl
import gc
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import foreroute as fr
from foreroute.cli.demo import demo_values
from foreroute.errors import printable
from tests.robustness import NIGHT
from tests.robustness.doors_files import write_files
from tests.traces import random_trace

MOST = 0 if NIGHT else 16
"""Cases of all verbs: by night all of them, which are about eight hundred."""
DEADLINE_S = 30.0
MOST_BYTES_MORE = 1 << 30
"""Of memory, than what is loaded: a case that reads a device to its end shall not take the machine with it."""
HOSTILE = "\x1b]0;m\x07\x1b[2J\u202e\x9b1m\N{RIGHT-TO-LEFT ISOLATE}"
NOT_UTF8 = os.fsdecode(b"n\xff\xc3(")
FORK = multiprocessing.get_context("fork")

INPUTS = (
    ("trace.safetensors", "inspect @"),
    ("trace.safetensors", "validate @"),
    ("trace.safetensors", "convert @ out --to ordered"),
    ("answer.json", "convert @ out {trace}"),
    ("model", "convert {good}/answer.json out --model @"),
    ("trace.safetensors", "convert {good}/answer.json out --model @"),
    ("tokens.json", "convert {good}/no-tokens.json out {trace} --tokens @"),
    ("trace.safetensors", "diff @ {good}/trace.safetensors"),
    ("trace.safetensors", "diff {good}/trace.safetensors @"),
    ("model", "doctor --model @ --rollout {good}/generation.safetensors"),
    ("run", "doctor --model @"),
    ("generation.safetensors", "doctor --model {good}/model --rollout @"),
    ("engine.safetensors", "doctor --model {good}/model --rollout @"),
    ("generation.safetensors", "doctor --rollout {good}/generation.safetensors --trainer @"),
    ("engine.safetensors", "doctor --rollout {good}/engine.safetensors --trainer @"),
    ("generation.safetensors", "doctor {passes} --replayed @"),
    ("cluster.toml", "plan {good}/counts.safetensors --no-baselines --topology @"),
    ("trace.safetensors", "plan @ --topology {good}/cluster.toml --no-baselines"),
    ("counts.safetensors", "plan @ --topology {good}/cluster.toml --no-baselines"),
    ("plan.safetensors", "plan {step} --previous @"),
    ("counts.safetensors", "plan {step} --previous @"),
    ("trace.safetensors", "plan {step} --previous @"),
    ("simulate.toml", "simulate @ --output out"),
    ("measured.jsonl", "simulate {good}/simulate.toml --output out --rate layer_s --fit @"),
    ("run", "report @ --output out.html"),
    ("run", "report {good}/run @ --output out.html"),
    ("train.toml", "train @ --folder out"),
    ("run", "train {good}/train.toml --resume --folder @"),
)
"""What is valid for an argument, and the command line: @ is the argument."""
OUTPUTS = (
    "convert {good}/trace.safetensors @ --to ordered",
    "plan {step} --output @",
    "doctor {passes} --output @",
    "report {good}/run --output @",
    "simulate {good}/simulate.toml --output @",
    "train {good}/train.toml --folder @",
    "demo --steps 1 --folder @",
    "demo-ep --steps 1 --folder @",
)
PARTS = {
    "{passes}": "--rollout {good}/generation.safetensors --trainer {good}/generation.safetensors",
    "{trace}": "--model {good}/trace.safetensors",
    "{step}": "--topology {good}/cluster.toml {good}/counts.safetensors --no-baselines",
}
REFUSED, FINE, ANY = frozenset({2}), frozenset({0, 1}), frozenset({0, 1, 2})
NAMES, IMPOSSIBLE = (HOSTILE, NOT_UTF8), ("there.txt/given", "x" * 300)
STREAMS = {("closed", "", ""): FINE, ("", "", "closed"): FINE}
STREAMS |= {("", how, ""): REFUSED for how in ("closed", "full", "cut")}


@dataclass(frozen=True)
class Case:
    """One process: the argument is `given`, relative to its folder, and made there from what would be `valid`."""

    words: str
    condition: str
    codes: frozenset[int]
    given: str
    valid: str = ""
    streams: tuple[str, str, str] = ("", "", "")

    @property
    def name(self):
        return f"{self.words}: {self.condition}, {self.given!a}, {self.streams}"


def matrix():
    """Every verb, every argument and stream, every condition."""
    for valid, words in INPUTS:
        suffix = Path(valid).suffix
        for condition in MADE:
            # to the doctor a folder of a model is as good as one of a run
            fine = FINE if condition == "valid" else REFUSED
            yield Case(words, condition, fine, f"given{suffix}", valid)
        for name in NAMES:
            # the safetensors library, which reads weights, takes no name that is not UTF-8
            codes = REFUSED if valid == "model" and name == NOT_UTF8 else FINE
            yield Case(words, "missing", REFUSED, name + suffix, valid)
            yield Case(words, "valid", codes, name + suffix, valid)
        for name in (*(name + suffix for name in IMPOSSIBLE), "/dev/zero", "/dev/full", "/dev/null"):
            yield Case(words, "missing", REFUSED, name, valid)
    for words in OUTPUTS:
        suffix = {"plan": ".safetensors", "report": ".html", "doctor": ".html"}.get(words.split()[0], "")
        for name in ("new", "a/b/new", *NAMES):
            codes = REFUSED if words.startswith("demo ") and name == NOT_UTF8 else accepted(words)
            yield Case(words, "missing", codes, name + suffix)
        for name in (*(name + suffix for name in IMPOSSIBLE), "there.txt"):
            yield Case(words, "missing", REFUSED, name)
        yield Case(words, "missing", FINE if words.startswith("demo ") else REFUSED, "folder")
        for condition in ("FIFO", "socket", "link to itself", "link to a text"):
            yield Case(words, condition, REFUSED, f"given{suffix}")
        yield Case(words, "dangling link", ANY, f"given{suffix}")
    for valid, words in (*INPUTS, *(("", words) for words in OUTPUTS)):
        for streams, codes in STREAMS.items():
            codes, given = REFUSED if codes == REFUSED else accepted(words), f"{{good}}/{valid}" if valid else "new"
            yield Case(words, "missing", codes, given, streams=streams)


def accepted(words):
    """Without torchrun, demo-ep has nothing to do."""
    return REFUSED if words.startswith("demo-ep") else FINE


def copied(at, valid):
    if valid.is_dir():
        shutil.copytree(valid, at)
    else:
        shutil.copy(valid, at)
        if valid.name == "measured.jsonl":  # which names a file beside it
            shutil.copy(valid.with_name("counts.safetensors"), at.with_name("counts.safetensors"))


def cut(at, valid):
    copied(at, valid)
    for path in [at] if at.is_file() else [path for path in at.iterdir() if path.is_file()]:
        data = path.read_bytes()
        # a TOML that ends between two keys is another valid one
        path.write_bytes(data[: data.rindex(b"[") + 1] if path.suffix == ".toml" else data[: len(data) * 6 // 10])


def bound(at, valid):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(at))


MADE = {
    "missing": lambda at, valid: None,
    "empty": lambda at, valid: at.mkdir() if valid.is_dir() else at.touch(),
    "directory": lambda at, valid: at.mkdir(),
    "text": lambda at, valid: at.write_text("not what you expect\n"),
    "truncated": cut,
    "FIFO": lambda at, valid: os.mkfifo(at),
    "socket": bound,
    "dangling link": lambda at, valid: at.symlink_to("nothing"),
    "link to itself": lambda at, valid: at.symlink_to(at),
    "link to a device": lambda at, valid: at.symlink_to("/dev/zero"),
    "link to a text": lambda at, valid: at.symlink_to("there.txt"),
    "valid": copied,
}
"""Makes what the argument names."""


@dataclass
class Result:
    case: Case
    code: int
    stdout: bytes
    stderr: bytes
    hung: bool
    destroyed: list


def run(case, here, good):
    """Try one case, in a folder of its own that is made for it and removed."""
    (here / "folder").mkdir(parents=True)
    for name in ("there.txt", "folder/mine.txt"):
        (here / name).write_text("mine\n")
    MADE[case.condition](here / case.given, good / case.valid)
    before, pipes = contents(here), [os.pipe(), os.pipe()]
    for read, _ in pipes:
        fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, 1 << 20)
    process = FORK.Process(target=child, args=(case, here, good, [write for _, write in pipes]))
    process.start()
    process.join(DEADLINE_S)
    hung = process.is_alive()
    process.kill()
    with suppress(ProcessLookupError):  # processes that it started and left behind
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    texts = []
    for read, write in pipes:
        os.close(write)
        with open(read, "rb") as pipe:
            texts.append(pipe.read())
    after = contents(here)
    is_kept = "--resume" not in case.words
    destroyed = [ascii(name) for name, what in before.items() if after.get(name) != what and is_kept]
    shutil.rmtree(here)
    return Result(case, process.exitcode, *texts, hung, destroyed)


def child(case, here, good, outputs):
    """The process of a case."""
    os.setsid()
    gc.freeze()  # what pytest's process has left is not collected here, where its files are closed
    arrange_streams(case, outputs)
    os.environ["HOME"] = str(here)
    os.chdir(here)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES_MORE, size + MOST_BYTES_MORE))
    words = case.words
    for part, text in PARTS.items():
        words = words.replace(part, text)
    filled = [word.replace("@", case.given) for word in words.split(" ")]
    sys.argv = ["foreroute", *(word.replace("{good}", str(good)) for word in filled)]
    from foreroute.cli.main import main

    main()


def arrange_streams(case, outputs):
    """As a shell would have started it, and as an interpreter would have opened them."""
    ends = []
    for how, usual in zip(case.streams, (os.open(os.devnull, os.O_RDONLY), *outputs), strict=True):
        if how == "full":
            usual = os.open("/dev/full", os.O_WRONLY)
        elif how == "cut":
            read, usual = os.pipe()
            os.close(read)
        ends.append(None if how == "closed" else usual)
    for number, end in enumerate(ends):
        if end is None:
            os.close(number)
        else:
            os.dup2(end, number)
    sys.stdin, sys.stdout, sys.stderr = (
        None if end is None else open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        for number, (end, mode, errors) in enumerate(
            zip(ends, "rww", ("surrogateescape", "strict", "backslashreplace"), strict=True)
        )
    )


def contents(folder):
    """Everything below a folder: its mode, and what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (mode, what)
    return found


def judged(results):
    """Names of the cases behind each failure."""
    return {
        "tracebacks": [r.case.name for r in results if b"Traceback (most recent" in r.stdout + r.stderr],
        "hangs": [r.case.name for r in results if r.hung],
        "wrong exit codes": [f"{r.case.name} ({r.code})" for r in results if not r.hung and r.code not in r.case.codes],
        "raw bytes": [r.case.name for r in results if is_raw(r.stdout) or is_raw(r.stderr)],
        "silent": [r.case.name for r in results if r.code != 0 and not r.hung and is_silent(r)],
        "destroyed": [f"{r.case.name} ({', '.join(r.destroyed)})" for r in results if r.destroyed],
    }


def is_raw(output):
    """Whether something in it is obeyed by a terminal, or is no text."""
    try:
        text = output.decode()
    except UnicodeDecodeError:
        return True
    return printable(text) != text


def is_silent(result):
    """Whether it failed without a word, although somebody listens."""
    on_stdout = result.case.words.startswith(("validate", "doctor", "diff"))
    return not (result.stderr + result.stdout * on_stdout).strip() and not any(result.case.streams)


@pytest.mark.slow
def test_no_input_output_or_stream_breaks_a_verb(monkeypatch, tmp_path):
    values = demo_values()
    values["warm_start"]["max_steps"] = 1  # it takes minutes
    values["rollout"] |= {"prompts": 2, "group_size": 2}
    monkeypatch.setattr("foreroute.cli.demo.demo_values", lambda: values)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").mkdir()
    write_files(tmp_path / "good")
    # what verbs import when they run, so that each case need not; torch does not load within the memory of a case
    verbs = [f"cli.{name}" for name in ("convert", "demo", "doctor", "plan", "simulate", "terminal", "traces", "train")]
    pages = [f"report.{name}" for name in ("plan", "simulation", "run_plots", "diagnosis")]
    for name in (*verbs, *pages, "adapters.checkpoint", "doctor.examine"):
        importlib.import_module(f"foreroute.{name}")
    cases = list(matrix())
    cases = cases[:: max(1, len(cases) // MOST)] if MOST else cases
    assert len(cases) >= (MOST or 700)
    results = [run(case, tmp_path / f"case{number}", tmp_path / "good") for number, case in enumerate(cases)]
    failures = {failure: names for failure, names in judged(results).items() if names}
    print(f"{len(cases)} cases: {failures}")
    assert failures == {}


CARELESS = {
    "": lambda: None,
    "tracebacks": lambda: {}["key"],
    "hangs": signal.pause,
    "wrong exit codes": lambda: (print("no code of ours", file=sys.stderr), sys.exit(3)),
    "raw bytes": lambda: print("\x1b[2J"),
    "silent": lambda: (print(file=sys.stderr), sys.exit(2)),
    "destroyed": lambda: Path("there.txt").unlink(),
}
"""Verbs with one defect each, by its failure."""


@pytest.mark.parametrize("defect", CARELESS)
def test_what_a_careless_verb_does_is_seen(tmp_path, monkeypatch, defect):
    fr.save(random_trace(0), tmp_path / "trace.safetensors")
    monkeypatch.setattr("foreroute.cli.main.main", CARELESS[defect])
    monkeypatch.setattr(sys.modules[__name__], "DEADLINE_S", 0.5 if defect == "hangs" else 60.0)
    case = Case("inspect @", "valid", ANY, "given", "trace.safetensors")
    found = judged([run(case, tmp_path / "case", tmp_path)])
    assert {name for name, cases in found.items() if cases} == {defect} - {""}
