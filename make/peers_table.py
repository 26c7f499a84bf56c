"""Writes the table of docs/tensors.md from tests/peers: models, variants and the mark of each file.

`make config-reference` runs it. Tests are read, not imported, as each needs an environment of its own:

    @pytest.mark.proven("torchtitan", '`attach(model, {"tokens": tokens})`')  # what a user types
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tensors.md"
BEGIN, END = "<!-- by make/peers_table.py -->\n", "<!-- end -->\n"
HEAD = """| | models, gates | checkpoints, compiled blocks | type |
|---|---|---|---|
"""


def peers_table(tests: Path = ROOT / "tests" / "peers") -> str:
    """The table, a line for each file of tests."""
    return HEAD + "".join(map(_line, sorted(tests.glob("test_*.py"))))


def _line(file: Path) -> str:
    tree = ast.parse(file.read_text("utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    cases = [ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "Case"]
    [(peer, typed)] = [
        map(ast.literal_eval, call.args) for call in calls if ast.unparse(call.func).endswith("mark.proven")
    ]
    [variants] = [
        [ast.literal_eval(key) for key in node.value.keys if key is not None]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "VARIANTS"
        and isinstance(node.value, ast.Dict)
    ]
    version = re.search(rf"{peer}==(\S+)", (ROOT / "make" / "peers.mk").read_text("utf-8"))
    if version is None:
        raise ValueError(f"{file}: make/peers.mk has no {peer}")
    return f"| {peer} {version[1]} | {'; '.join(cases)} | {', '.join(variants)} | {typed} |\n"


def with_table(page: str) -> str:
    """The page, with the table of today."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + peers_table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
