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


def foreroute(*arguments, cwd=None, columns=120):
    """`foreroute ARGUMENTS`, started in a folder, at the width of a terminal."""
    out, err, code = io.StringIO(), io.StringIO(), 0
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
            code = end.code or 0
    return Result(code, out.getvalue(), err.getvalue())
