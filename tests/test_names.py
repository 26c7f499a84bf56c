"""One name, one thing: for the modules of the tests and for the public classes of src.

Test modules are imported by name from many folders, so a second of a name would hide the first.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"


def test_no_two_modules_of_the_tests_share_a_name():
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    shared = {name for name, count in names.items() if count > 1} - {"conftest.py", "__init__.py"}
    assert not shared


def test_no_two_public_classes_share_a_name():
    where = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: places for name, places in where.items() if len(places) > 1} == {}
