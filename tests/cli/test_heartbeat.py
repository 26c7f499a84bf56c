"""No command is silent for long, and one that is quick prints what it prints and nothing else."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import threading
from contextlib import ExitStack

import numpy as np
import pytest

import foreroute as fr
from foreroute.cli import terminal
from foreroute.cli.main import main
from foreroute.cli.terminal import CommandProgress, Console, working
from foreroute.errors import ForerouteError
from foreroute.plan import save_counts
from tests.traces import random_trace

TOPOLOGY = """
topology = {num_ranks = 4, redundant_slots = 1}
hardware = {preset = "h100"}
model = {preset = "qwen3-30b-a3b", num_experts = 8, top_k = 2}
"""
SIMULATION = """
methods = ["static"]
[cluster]
gpus = 8
expert_parallel = 4
[model]
preset = "qwen3-30b-a3b"
[sweep]
skew = [2.0]
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    fr.save(random_trace(0, num_experts=8, top_k=2), tmp_path / "t")
    save_counts(np.ones((2, 3, 4, 8), np.int32), tmp_path / "counts.safetensors")
    (tmp_path / "cluster.toml").write_text(TOPOLOGY)
    (tmp_path / "simulate.toml").write_text(SIMULATION)
    (tmp_path / "run.toml").write_text('name = "slow"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(files, monkeypatch, capfd):
    """Runs a verb; the exit code, and the lines on the two streams."""

    def run(words):
        monkeypatch.setattr(sys, "argv", ["foreroute", *words.split()])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return ended.value.code or 0, out.splitlines(), err.splitlines()

    return run


PLAN = "plan --counts counts.safetensors --topology cluster.toml --output plan.safetensors"


@pytest.mark.parametrize(
    ("words", "slow", "said"),
    [
        ("inspect t", "traces.load", "reading t"),
        ("inspect t", "traces.digest", "counting the routes of t"),
        ("validate t", "traces.load", "reading t"),
        ("validate t u", "traces.load", r"reading t: 0 of 2 files"),
        ("diff t t", "traces.load", "reading t and t"),
        ("diff t t", "traces.explain", "comparing"),
        ("convert t u", "convert.load", "reading t"),
        ("convert t u", "convert.save", "writing u"),
        (PLAN, "plan.read_step", "reading the step"),
        (PLAN, "plan.plan", "planning the first micro-step, which compiles once on a machine"),
        (PLAN, "plan.verify", "verifying and writing the plan"),
        (PLAN, "plan.compare", r"comparing with other balancers: 0 of \d+"),
        (f"{PLAN} --no-baselines", "plan.figures_of", "pricing every cell"),
        (f"{PLAN} --no-baselines", "plan.write_plan_page", "drawing the page"),
        ("simulate simulate.toml", "simulate.simulate", "simulating"),
        ("doctor --trainer t --rollout t", "doctor.load", "reading the rollout"),
        ("doctor --trainer t --rollout t", "doctor.TrainerPass", "reading the trainer's passes"),
        ("doctor --trainer t --rollout t", "doctor.diagnose", "comparing"),
        ("doctor --model t --rollout t", "doctor._examined", "loading the model"),
        ("doctor --trainer t --rollout t --output p", "doctor.write_diagnosis", "drawing the page"),
        ("train run.toml", "train.train", "slow, preparing the run"),
        ("demo --folder d", "demo.train", "none, preparing the run"),
        ("report run", "records.read_runs", "drawing the page"),
    ],
)
def test_a_verb_names_what_it_does_while_it_lasts(command, monkeypatch, words, slow, said):
    told = []

    def stand_in(*_, **__):
        told.append(str(terminal._under_way[-1]))
        raise ForerouteError("enough")

    room = "foreroute" if slow.startswith("records.") else "foreroute.cli"
    monkeypatch.setattr(f"{room}.{slow}", stand_in)
    code, _, err = command(words)
    assert (code, err[-1]) == (1, "error: enough")
    assert re.fullmatch(rf"{said}, \d+ s", told[0]), told


@pytest.mark.parametrize("words", ["inspect t", "validate t", "diff t t", "convert t u", f"{PLAN} --no-baselines"])
def test_a_quick_verb_says_nothing(command, monkeypatch, words):
    monkeypatch.setattr(terminal, "SILENCE_S", 60.0)  # this machine may be busy
    threads = threading.active_count()
    code, out, err = command(words)
    assert (code, err) == (0, [])
    assert not any(re.search(r"\d s$", line) for line in out)
    assert threading.active_count() == threads


def test_imports_and_what_has_no_name_are_not_silent_either(command, monkeypatch):
    told = []

    def noted(path):
        told.append(terminal._under_way[-1].what)
        with working("naming", Console()):
            told.append(terminal._under_way[-1].what)
        told.append(terminal._under_way[-1].what)

    monkeypatch.setattr("foreroute.cli.traces.print_trace", noted)
    command("inspect t")
    assert told == ["foreroute", "naming", "foreroute"]


def test_a_line_says_how_much_is_done_how_long_the_rest_takes_and_obeys_no_name(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal, "monotonic", lambda: now[0])
    work = CommandProgress("planning", total=9216, unit="cells")
    now[0] = 1112.4
    assert str(work) == "planning: 0 of 9,216 cells, 1,012 s"
    work.advance(1234, 9216, "static")
    assert str(work) == "planning: static, 1,234 of 9,216 cells, 1,012 s", "the pace is not known yet"
    now[0] += 10
    work.advance(2234, 9216)
    assert str(work) == "planning: 2,234 of 9,216 cells, 1,022 s, 0:01:10 left"
    work.begin("a\x1b[2J\nb")
    assert str(work) == r"a\x1b[2J\nb, 0 s"


SLOW = """
import sys, time
from foreroute.cli import main, terminal, traces
from foreroute.cli.terminal import Console

def slow(path):
    console = Console()
    console.print("begin")
    with terminal.working("planning", console, total=9216, unit="cells") as work:
        work.done = 1234
        for _ in range({rounds}):
            time.sleep(0.1)
    console.print("end")

terminal.SILENCE_S = {every}
traces.print_trace = slow
sys.argv = ["foreroute", "inspect", "t"]
main.main()
"""
SAID = "planning: 1,234 of 9,216 cells"


def said(lines):
    """What the lines say, without their seconds, and without what is said before the work and after it."""
    return {line.rpartition(", ")[0] for line in lines} - {"foreroute"}


def wait_for_a_line(process):
    while not process.stderr.readline().startswith(SAID):
        pass


def started(rounds=6, every=0.2, variables=(), **options):
    """A command that prints one line, works for a while, and prints another."""
    text = SLOW.format(rounds=rounds, every=every)
    environment = {**os.environ, "PYTHONUNBUFFERED": "", **dict(variables)}  # streams are buffered
    streams = {"stdout": -1, "stderr": -1, "text": True, **options}
    return subprocess.Popen([sys.executable, "-c", text], env=environment, **streams)


def test_off_a_terminal_the_lines_go_to_standard_error():
    with started(rounds=12) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "begin\nend\n")
    assert len(err.splitlines()) >= 3
    assert said(err.splitlines()) == {SAID}


def test_ranks_but_the_first_are_silent():
    with started(variables={"RANK": "1"}) as process:
        assert process.communicate(timeout=60) == ("begin\nend\n", "")


def test_nobody_reads_what_it_prints():
    with started(rounds=10, every=0.05) as process:
        assert process.stdout.readline() == "begin\n"
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(30) == 2
    assert said(err.splitlines()) == {SAID}


def test_nobody_reads_what_it_says():
    with started(rounds=10, every=0.05) as process:
        wait_for_a_line(process)
        process.stderr.close()
        assert process.stdout.read() == "begin\nend\n"
        assert process.wait(30) == 0
    with started(rounds=10, every=0.05, stderr=subprocess.STDOUT) as process:
        while process.stdout.readline() != "begin\n":
            pass
        process.stdout.close()
        assert process.wait(30) == 2


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk(stream):
    with open("/dev/full", "w") as full, started(rounds=4, every=0.05, **{stream: full}) as process:
        out, err = process.communicate(timeout=30)
    if stream == "stderr":
        assert (process.returncode, out) == (0, "begin\nend\n")
    else:
        assert process.returncode == 2
        assert err.splitlines()[-1] == "error: standard output: No space left on device"


def test_a_reader_who_does_not_read_holds_nothing_up():
    with ExitStack() as held:
        ends = os.pipe()
        for end in ends:
            held.callback(os.close, end)
        size = fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
        os.write(ends[1], b"x" * (size - 10))
        process = held.enter_context(started(rounds=5, every=0.05, stderr=ends[1]))
        assert process.communicate(timeout=30)[0] == "begin\nend\n"
        assert process.returncode == 0


def test_a_terminal_shows_a_status_and_needs_no_lines():
    main_end, end = pty.openpty()
    with started(rounds=20, every=1.0, stdout=end, variables={"TERM": "xterm", "COLUMNS": "100"}) as process:
        os.close(end)
        shown = b""
        while True:
            try:
                shown += os.read(main_end, 4096)
            except OSError:
                break
        assert process.stderr.read() == ""
        assert process.wait(30) == 0
    os.close(main_end)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert f"{SAID}, 1 s" in text
    assert "━" in text, "a bar"
