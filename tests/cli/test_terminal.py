"""What reaches a terminal: shown and never obeyed, at every width and on every stream."""

import io
import os
import subprocess
import sys

from rich.table import Table
from rich.text import Text

from foreroute.cli.terminal import Console
from foreroute.errors import printable
from tests.tiers import grid

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
    """`tests/robustness/test_doors.py` has more of them, names and widths that are hostile, for every verb."""
    result = shell(command, tmp_path)
    assert (result.returncode, result.stderr) == (code, message)
