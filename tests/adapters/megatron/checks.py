"""Tests whose bodies run in a process with Megatron, listed without importing it."""

import ast
from pathlib import Path

import pytest

from forked_ranks import run


def checks_of(module, ranks=1):
    """One test for every function `check_…` of a module beside this one."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]
    assert names, f"{module} has no checks"

    @pytest.mark.parametrize("check", names)
    def test(check):
        run(f"{module}.{check}", ranks=ranks)

    return test
