"""One name, one thing: modules of the tests are told apart by their packages, public classes of src by their names."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.source_nodes import source_nodes

TESTS = Path(__file__).parent


def test_every_folder_with_modules_of_the_tests_is_a_package():
    """A module of another folder would be imported under its bare name, where it may hide one or be hidden."""
    folders = {path.parent for path in TESTS.rglob("*.py") if "fake" not in path.relative_to(TESTS).parts}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_no_two_public_classes_share_a_name():
    where = defaultdict(list)
    for path, nodes in source_nodes():
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(f"{path}:{node.lineno}")
    assert {name: places for name, places in where.items() if len(places) > 1} == {}
