"""What is wrong at a door of the command line: every verb, every argument and stream, every condition."""

import os
from dataclasses import dataclass, field
from pathlib import Path

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
    ("doctor", "--model, a folder", "model", "doctor --model @ --rollout {good}/generation.safetensors"),
    ("doctor", "--model, a run", "run", "doctor --model @"),
    ("doctor", "--rollout", "generation.safetensors", "doctor --model {good}/model --rollout @"),
    ("doctor", "--rollout, a trace", "engine.safetensors", "doctor --model {good}/model --rollout @"),
    ("doctor", "--trainer", "generation.safetensors", "doctor --rollout {good}/generation.safetensors --trainer @"),
    ("doctor", "--trainer, a trace", "engine.safetensors", "doctor --rollout {good}/engine.safetensors --trainer @"),
    ("doctor", "--replayed", "generation.safetensors", "doctor {passes} --replayed @"),
    ("plan", "--topology", "cluster.toml", "plan {good}/counts.safetensors {few} --topology @"),
    ("plan", "traces", "trace.safetensors", "plan @ --topology {good}/cluster.toml {few}"),
    ("plan", "counts", "counts.safetensors", "plan @ --topology {good}/cluster.toml {few}"),
    ("plan", "--previous, a plan", "plan.safetensors", "plan {step} {few} --previous @"),
    ("plan", "--previous, counts", "counts.safetensors", "plan {step} {few} --previous @"),
    ("plan", "--previous, a trace", "trace.safetensors", "plan {step} {few} --previous @"),
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
    "{passes}": "--rollout {good}/generation.safetensors --trainer {good}/generation.safetensors",
    "{trace}": "--model {good}/trace.safetensors",
    "{few}": "--no-baselines",
    "{step}": "--topology {good}/cluster.toml {good}/counts.safetensors",
}
REFUSED, FINE, ANY = frozenset({2}), frozenset({0, 1}), frozenset({0, 1, 2})


@dataclass
class Case:
    """One process.

    Attributes:
        words: the command line, where @ is the argument.
        given: the argument; relative to the case's folder.
        valid: what would be right, in the folder of valid files; empty for outputs.
        may_change: a folder that is there to be changed.
        unprivileged: whether it runs as nobody, for whom modes of files count.
        streams: of standard input, output and error, what is not as usual: closed, full, or cut (nobody reads).
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
    def name(self):
        return f"{self.verb}, {self.door}: {self.condition}"


def matrix():
    """Every verb, every argument and stream, every condition."""
    for verb, door, kind, words in INPUTS:
        yield from _inputs(verb, door, words, kind)
    for verb, door, kind, words in OUTPUTS:
        yield from _outputs(verb, door, words, kind)
    usual = {verb: (words, kind) for verb, _, kind, words in (*INPUTS[::-1], *OUTPUTS[::-1])}
    for verb, (words, kind) in usual.items():
        given = "new" if kind in ("file", "folder") else f"{{good}}/{kind}"
        yield from _streams(verb, words, given)


def _inputs(verb, door, words, valid):
    suffix = Path(valid).suffix

    def case(condition, codes=REFUSED, given=f"given{suffix}", **more):
        may_change = given if "--resume" in words and condition.startswith("valid") else ""
        return Case(verb, door, condition, words, codes, given, valid, may_change, **more)

    yield case("missing", given=f"missing{suffix}")
    yield case("missing, hostile name", given=f"{HOSTILE}{suffix}")
    yield case("missing, name not UTF-8", given=f"{NOT_UTF8}{suffix}")
    yield case("below a file", given=f"there.txt/given{suffix}")
    yield case("name too long", given="x" * 300 + suffix)
    for condition in ("empty", "text", "truncated", "FIFO", "directory", "dangling link", "link to itself"):
        yield case(condition)
    # a folder of a model is as good as one of a run
    yield case("wrong kind", ANY if verb == "doctor" and valid == "run" else REFUSED)
    yield case("socket")
    for device in ("zero", "full", "null"):
        yield case(f"device {device}", given=f"/dev/{device}")
    yield case("link to a device")
    yield case("unreadable", unprivileged=True)
    yield case("below an unreadable folder", given=f"private/given{suffix}", unprivileged=True)
    yield case("valid", FINE)
    yield case("valid, hostile name", FINE, given=f"{HOSTILE}{suffix}")
    # the safetensors library, which reads weights, takes no such name
    codes = REFUSED if valid == "model" else FINE
    yield case("valid, name not UTF-8", codes, given=f"{NOT_UTF8}{suffix}")


def _outputs(verb, door, words, kind):
    suffix = {"plan": ".safetensors", "report": ".html", "doctor": ".html"}.get(verb, "")
    fine = REFUSED if verb == "demo-ep" else FINE  # without torchrun there is nothing to do

    def case(condition, codes=REFUSED, given=f"given{suffix}", **more):
        return Case(verb, door, condition, words, codes, given, **more)

    yield case("new", fine, given=f"new{suffix}")
    yield case("new, in new folders", fine, given=f"a/b/new{suffix}")
    yield case("new, hostile name", fine, given=f"{HOSTILE}{suffix}")
    yield case("new, name not UTF-8", fine, given=f"{NOT_UTF8}{suffix}")
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


def _streams(verb, words, given):
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
