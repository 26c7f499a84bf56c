"""How a command ends: one message and an exit code, after a signal, without libraries, and by a bug of ours."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from unittest.mock import Mock

import pytest
from rich.table import Table
from rich.text import Text

import foreroute as fr
from foreroute.cli.terminal import Console
from foreroute.errors import printable
from tests.cli.command import foreroute
from tests.report.report_runs import config, step_line, write_run
from tests.test_imports import blocked
from tests.traces import random_trace

OPTIONAL = ("torch", "transformers", "jinja2", "matplotlib", "megatron", "trl", "peft", "scipy")
BRINGS_HF = "pip install '.[hf]' in a clone of foreroute brings it"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (PermissionError(13, "Permission denied", "/priv\x1bate"), 2, r"error: /priv\x1bate: Permission denied"),
        (OSError(28, "No space left on device"), 2, "error: the system refused to go on: No space left on device"),
        (MemoryError("9 GiB"), 2, "error: there is not enough memory (9 GiB)"),
        (fr.ForerouteError("the engine\x07 died"), 1, r"error: the engine\x07 died"),
        (ModuleNotFoundError("", name="torch.nn"), 2, f"error: this needs torch, which is not installed; {BRINGS_HF}"),
        (UnicodeEncodeError("utf-8", "a\udcffb", 1, 2, ""), 2, r"error: a\udcffb is not text in UTF-8; rename it"),
    ],
)
def test_what_a_user_can_mend_is_one_line(tmp_path, monkeypatch, error, code, message):
    monkeypatch.setattr("foreroute.cli.traces.print_trace", Mock(side_effect=error))
    assert foreroute("inspect", tmp_path, code=code).stderr == f"{message}\n"


def test_a_bug_of_ours_can_be_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("foreroute.cli.traces.print_trace", Mock(side_effect=KeyError("wei\x1b[2Jghts")))
    result = foreroute("inspect", tmp_path, code=1)
    assert result.stderr.startswith("Traceback")
    assert result.stderr.splitlines()[-1].startswith("This is a bug of foreroute. Please report it")
    assert "\x1b" not in result.stderr


def test_a_warning_is_one_line_and_the_handlers_are_given_back(tmp_path, monkeypatch):
    def warn(path):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "what nohup ignores stays ignored"
        warnings.warn("old \x1b]0;steps\x07", stacklevel=1)

    monkeypatch.setattr("foreroute.cli.traces.print_trace", warn)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = foreroute("inspect", tmp_path)
    assert result.stderr == "warning: old \\x1b]0;steps\\x07\n"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    signal.signal(signal.SIGHUP, before)


HANGING = """
import signal, sys, threading, time
for number in (signal.SIGHUP, signal.SIGTERM):  # whoever started the tests may ignore them
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from foreroute.cli import main, traces
from foreroute.files.writing import write_atomically

def hang(path):
    def fill(file):
        print("ready", flush=True)
        time.sleep(60)
    write_atomically(path / "out", fill)

threading.Thread(target=time.sleep, args=(60,)).start()
traces.print_trace = hang
sys.argv = ["foreroute", "inspect", sys.argv[1]]
main.main()
"""


def signalled(text, folder, number):
    """Exit code and last words of a process that got a signal while it was at work."""
    with subprocess.Popen([sys.executable, "-c", text, str(folder)], stdout=-1, stderr=-1, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)
            process.send_signal(number)
            _, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    return process.returncode, stderr


def test_a_signal_ends_a_verb_in_one_line_and_leaves_nothing_behind(tmp_path):
    """Python drops what is raised in a destructor: there one comes too, before the verb waits, or ends by itself."""
    waits = "        time.sleep(60)\n"
    held = "        class Held:\n            def __del__(self): time.sleep(3)\n        Held()\n"
    for text in (HANGING, HANGING.replace(waits, held + waits)):
        assert signalled(text, tmp_path, signal.SIGINT) == (130, "stopped: interrupted\n")
        assert list(tmp_path.iterdir()) == [], "the temporary file is gone"
    ended = signalled(HANGING.replace(waits, held), tmp_path, signal.SIGTERM)
    assert ended == (143, "stopped: ended by SIGTERM\n")


HOSTILE = "\x1b]0;mine\x07\x1b[2J\u202etxt.\x9b1m"
NOT_UTF8 = os.fsdecode(b"tr\xffce")


def test_what_is_printed_is_escaped_wherever_it_stands():
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=False)
    table = Table(title=Text(HOSTILE), caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE))
    table.add_row(HOSTILE)
    for shown in (HOSTILE, Text(HOSTILE), table, NOT_UTF8):
        console.print(shown, markup=False)
    console.rule(HOSTILE)
    console.print(f"[bold]{NOT_UTF8}[/]", style="red")
    assert printable(file.getvalue()) == file.getvalue()
    assert file.getvalue().encode()
    assert file.getvalue().count(r"\x1b[2J\u202e") >= 5
    assert r"tr\udcffce" in file.getvalue()


def test_a_closed_stream_is_not_the_file_that_is_written(tmp_path):
    """What libraries of C print goes to the number of the stream, whatever Python's is."""
    prints = """import os; from foreroute.cli.terminal import prepare_streams; prepare_streams()
with open("mine", "wb"):
    os.write(2, b"a warning of torch")"""
    subprocess.run(["bash", "-c", f"'{sys.executable}' -c '{prints}' 2>&-"], cwd=tmp_path, check=True)
    assert (tmp_path / "mine").read_bytes() == b""


LIGHT = """
import json
from tests.cli.command import foreroute
json.dump([vars(foreroute(*command.split(), code=None)) for command in json.load(sys.stdin)], sys.stdout)
"""


@pytest.mark.slow
def test_a_light_install_says_in_one_line_what_a_verb_needs(tmp_path):
    fr.save(random_trace(0), tmp_path / "t")
    (tmp_path / "run.toml").write_text('name = "light"')
    write_run(tmp_path / "run", config(), [step_line(0)])
    works = ("inspect t", "validate t", "convert t u --to ordered", "diff t t", "doctor --trainer t --rollout t")
    lacks = {"train run.toml": "hf", "report run": "report"}
    done = subprocess.run(
        [sys.executable, "-c", blocked(OPTIONAL) + LIGHT],
        input=json.dumps([*works, *lacks]),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        check=True,
    )
    results = json.loads(done.stdout)
    assert [result["returncode"] for result in results] == [0] * len(works) + [2] * len(lacks), results
    for result, extra in zip(results[len(works) :], lacks.values(), strict=True):
        needs = rf"error: [^\n]* needs [a-z0-9]+, which is not installed; pip install '\.\[{extra}\]' in a clone .*\n"
        assert re.fullmatch(needs, result["stderr"])
