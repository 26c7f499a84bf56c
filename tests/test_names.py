"""Names of test modules. They are imported by name from many folders, so a second of a name would hide the first."""

from collections import Counter
from pathlib import Path


def test_no_two_modules_of_the_tests_share_a_name():
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    shared = {name for name, count in names.items() if count > 1} - {"conftest.py", "__init__.py"}
    assert not shared
