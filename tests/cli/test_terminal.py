"""What reaches a terminal: shown and never obeyed, at every width and on every stream."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import foreroute as fr
from foreroute.cli.terminal import Console
from foreroute.errors import printable
from tests.tiers import grid
from tests.traces import random_trace

SOURCE = Path(fr.__file__).parent
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


def test_colours_and_progress_bars_still_reach_a_terminal():
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system="standard", _environ={})
    console.print("[red]danger[/]")
    assert file.getvalue() == "\x1b[31mdanger\x1b[0m\n"
    with Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False) as progress:
        progress.add_task(HOSTILE, total=2)
        progress.refresh()
    shown = file.getvalue()
    assert "\x1b[2K" in shown, "the bar is drawn over the one before"
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "\u202e" not in shown


def test_no_verb_prints_through_another_door():
    others = re.compile(r"rich\.console|typer\.echo|\bprint\(|sys\.stdout\.write")
    found = [
        f"{path.relative_to(SOURCE)}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if path.name != "terminal.py"
        for line in path.read_text().splitlines()
        if others.search(line.replace("console.print(", "").replace("Console().print(", ""))
    ]
    assert found == []


def shell(command, folder, **variables):
    """The command line in a shell, where streams can be redirected; `@` is the command."""
    ours = f"'{sys.executable}' -m foreroute.cli"
    environment = {**os.environ, "COLUMNS": "100", "PYTHONUNBUFFERED": "", **variables}  # streams are buffered
    return subprocess.run(
        ["bash", "-c", command.replace("@", ours)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@grid(
    ("command", "code", "message"),
    [
        ("@ --version >/dev/full", 2, "error: standard output: No space left on device\n"),
        ("@ --version >&-", 2, "error: standard output is closed; open it, or send it to /dev/null\n"),
        ("set -o pipefail; @ --version | (exec <&-; sleep 1)", 2, ""),
    ],
    quick=1,
)
def test_streams_that_cannot_be_written_are_one_message(tmp_path, command, code, message):
    """`tests/robustness/test_doors.py` has more of them, and names that are hostile, for every verb."""
    result = shell(command, tmp_path)
    assert (result.returncode, result.stderr) == (code, message)


@pytest.mark.slow
def test_letters_that_standard_output_lacks_are_escaped(tmp_path):
    fr.save(random_trace(0).with_provenance(writer="\N{LATIN SMALL LETTER E WITH ACUTE}"), tmp_path / "trace")
    result = shell("PYTHONIOENCODING=ascii @ inspect trace", tmp_path)
    assert result.returncode == 0, result.stderr
    assert r"\xe9" in result.stdout


def test_a_closed_stream_is_not_the_file_that_is_written(tmp_path):
    """What libraries of C print goes to the number of the stream, whatever Python's is."""
    prints = """import os; from foreroute.cli.terminal import prepare_streams; prepare_streams()
with open("mine", "wb"):
    os.write(2, b"a warning of torch")"""
    assert shell(f"'{sys.executable}' -c '{prints}' 2>&-", tmp_path).returncode == 0
    assert (tmp_path / "mine").read_bytes() == b""
