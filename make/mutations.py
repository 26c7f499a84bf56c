"""Changes one place of the source at a time and asks whether a room's tests notice: `python -m make.mutations --json`.

The places are drawn with a seed from the rooms' files, so that trees with equal rooms get equal mutations. A mutation
is killed when a test fails, or when the tests run four times as long as without it.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS = {
    "files": ["tests/files", "tests/robustness"],
    "trace": ["tests/trace", "tests/robustness"],
    "layout": ["tests/layout"],
    "capture": ["tests/capture", "tests/robustness"],
    "mismatch": ["tests/mismatch"],
    "plan": ["tests/plan", "tests/robustness"],
    "costs": ["tests/costs"],
    "ep": ["tests/ep"],
}
"""What is run for a mutation in a room; a folder that is not there is left out."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Mutation(NamedTuple):
    """One place of a file, and what stands there instead."""

    path: str
    line: int
    begin: int
    end: int
    text: str


def main() -> None:
    """Draw mutations, run the tests of their rooms, and print how many were killed and which were not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=120)
    parser.add_argument("--rooms", default=",".join(TESTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rooms = args.rooms.split(",")
    draw = random.Random(args.seed)
    killed, survivors = 0, []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", ".megatron*", "runs", "site", "dist", ".mypy_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for n, room in enumerate(rooms):
            share = args.number * (n + 1) // len(rooms) - args.number * n // len(rooms)
            found = list(_mutations(tree / "src" / "foreroute" / room))
            # a failing room would count every mutation as killed
            untouched = _seconds(tree, room, limit=3600)
            assert untouched is not None, f"the tests of {room} fail without a mutation"
            for mutation in draw.sample(found, min(share, len(found))):
                path = tree / mutation.path
                source = path.read_bytes()
                path.write_bytes(source[: mutation.begin] + mutation.text.encode() + source[mutation.end :])
                if _seconds(tree, room, limit=4 * untouched + 30) is None:
                    killed += 1
                else:
                    was = source[mutation.begin : mutation.end].decode()
                    survivors.append(f"{mutation.path}:{mutation.line}: {was} -> {mutation.text}")
                path.write_bytes(source)
                print(f"{room}: {killed} killed, {len(survivors)} not", file=sys.stderr)
    metrics = {"mutations": killed + len(survivors), "killed": killed, "survivors": survivors}
    print(json.dumps(metrics) if args.json else "\n".join([f"{killed} of {metrics['mutations']} killed", *survivors]))


def _mutations(room: Path) -> Iterator[Mutation]:
    """List every place of a room's files that can be changed, in one order."""
    for path in sorted(room.rglob("*.py")):
        source = path.read_bytes()
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        tree = ast.parse(source)
        annotations = {id(part) for node in ast.walk(tree) for part in _unexecuted(node)}
        for node in ast.walk(tree):
            if id(node) in annotations or (text := _instead(node)) is None:
                continue
            begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            yield Mutation(str(path.relative_to(room.parents[2])), node.lineno, begin, end, text)  # type: ignore[attr-defined]


def _unexecuted(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what of a node says types or how text is put together."""
    parts: list[ast.AST | None] = []
    if isinstance(node, ast.arg | ast.AnnAssign):
        parts.append(node.annotation)
    if isinstance(node, ast.FunctionDef):
        parts += [node.returns, *node.decorator_list]
    if isinstance(node, ast.JoinedStr):
        parts.append(node)
    for part in parts:
        if part is not None:
            yield from ast.walk(part)


def _instead(node: ast.AST) -> str | None:
    """The source of the changed node; None where nothing is changed."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Raise):
        return "pass"
    if isinstance(new, ast.Compare) and type(new.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(new.ops[0])]()  # type: ignore[call-overload]
    elif isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in SWAPS:
        new.op = SWAPS[type(new.op)]()  # type: ignore[assignment]
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        new = new.operand  # type: ignore[assignment]
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, int):
        new.value += 1
    else:
        return None
    return f"({ast.unparse(new)})"


def _seconds(tree: Path, room: str, limit: float) -> float | None:
    """Seconds of the tests of a room; None if one fails or they do not end within the limit."""
    folders = [name for name in TESTS[room] if (tree / name).exists()]
    # a kernel that took a constant of another file would not be compiled anew
    shutil.rmtree(tree / ".numba_cache", ignore_errors=True)
    environment = os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "NUMBA_CACHE_DIR": str(tree / ".numba_cache"),
        "NUMBA_OPT": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *folders]
    began = time.monotonic()
    try:
        run = subprocess.run(
            [*command, "-m", "not slow and not exhaustive"],
            cwd=tree,
            env=environment,
            capture_output=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return None
    return time.monotonic() - began if run.returncode == 0 else None


if __name__ == "__main__":
    main()
