"""What the modules of the package are made of: parsed once for all tests of a process that read them."""

import ast
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


@cache
def source_nodes():
    """Each module, as a path below `src`, with all its nodes."""
    return [
        (path.relative_to(SOURCE), [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))])
        for path in sorted(SOURCE.rglob("*.py"))
    ]
