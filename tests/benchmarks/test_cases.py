"""The command line of the benchmarks: what it offers can be run."""

import ast
from pathlib import Path

import benchmarks


def test_every_file_that_is_offered_as_a_case_has_a_run():
    cases = {path.stem: ast.parse(path.read_text()) for path in Path(benchmarks.__path__[0]).glob("[!_]*.py")}
    assert len(cases) > 5
    runs = {name for name, tree in cases.items() for node in tree.body if getattr(node, "name", "") == "run"}
    assert runs == set(cases)
