"""The command line as a user meets it, in this process: a new one imports torch for seconds."""

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from foreroute.cli.main import main

CLUSTER = """
topology = {num_ranks = 4, ranks_per_node = 2, redundant_slots = 2}
hardware = {preset = "h100"}
model = {preset = "qwen3-30b-a3b", num_experts = 8, top_k = 2}
"""
"""The file of a topology for `plan`."""


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str

    @property
    def said(self):
        return " ".join(self.stdout.split())


def refused(message, *arguments, **options):
    """It must end as a user's error does: in one message, which is returned, and with exit code 2."""
    result = foreroute(*arguments, code=2, **options)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr


def foreroute(*arguments, code=0, cwd=None, columns=120):
    """`foreroute ARGUMENTS`, started in a folder, at the width of a terminal; it must end so, unless code is None."""
    out, err, ended = io.StringIO(), io.StringIO(), 0
    command = ["foreroute", *map(str, arguments)]
    with (
        patch.object(sys, "argv", command),
        patch.dict(os.environ, {"COLUMNS": str(columns)}),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            ended = end.code or 0
    assert ended == code or code is None, out.getvalue() + err.getvalue()
    return Result(ended, out.getvalue(), err.getvalue())
