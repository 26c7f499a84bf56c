"""Changes one place of the source at a time and asks whether a room's tests notice: `python -m make.mutations`.

The quick tests of a room run once under coverage (`pip install coverage`). A mutation meets those that ran its lines,
cheapest first. One in C++, or in what runs on import, meets all of them, and each meets those with ranks: coverage sees
none of these. Lots are drawn by statements, or lines of C++, so that trees get equal mutations where their source is
equal. One that does not compile is drawn anew. A mutation is killed when a test fails, or when the tests run four times
as long as without it and two minutes.
"""

import argparse
import ast
import copy
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

ROOT = Path(__file__).parents[1]
ROOMS = "files,trace,layout,capture,mismatch,plan,costs,planner,replay,ep,adapters/hf,adapters/megatron"
READERS = "files", "trace", "capture", "plan"
"""Rooms that tests/robustness tests too."""
LOADED = "hypothesis", "scipy.optimize", "torch._dynamo", "transformers"
"""Once, before tests are forked."""
RANKS = "src/foreroute/testing/ranks.py"
LIBRARY = "src/foreroute/_kernels.so"
_COMPARED = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
_PAIRS = [*_COMPARED, (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
SWAPS[ast.Div] = ast.Mult
TOKEN = re.compile(r"(?<= )(?:[<>]=?|[=!]=|&&|\|\||[-+*/])(?= )|\b(?:true|false)\b|(?<![\w.])(?<!\de-)\d+(?![\w.])")
"""What is changed in C++, where a pair of signs stands between spaces."""
TOKENS = dict(pair.split(" ") for pair in ("< <=", "> >=", "== !=", "+ -", "* /", "&& ||", "true false"))
TOKENS |= {b: a for a, b in TOKENS.items()}


class Mutation(NamedTuple):
    """One place of a file, what stands there instead, the lines of its statement, and whether coverage sees them."""

    path: str
    told: str
    begin: int
    end: int
    text: str
    lot: bytes
    lines: range
    is_seen: bool


class Tests:
    """A plugin of pytest: the tests in an order, or all of them under coverage, with the seconds of each."""

    def __init__(self, order: dict[str, Any] | None = None, follow: coverage.Coverage | None = None) -> None:
        self.order, self.follow = order, follow
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave the others out."""
        if (order := self.order) is not None:
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell coverage whose lines follow, those of fixtures among them."""
        if self.follow is not None:
            self.follow.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails or is skipped takes for ever."""
        self.seconds[report.nodeid] += report.duration if report.passed else math.inf


def main() -> None:
    """Draw mutations, run the tests of their rooms, and print how many were killed and which were not, room by room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=240)
    parser.add_argument("--rooms", default=ROOMS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rooms = args.rooms.split(",")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv*", ".megatron*", "runs", "site", "dist", ".mypy_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        os.chdir(tree)
        os.environ |= {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        sys.path[:0] = [str(tree / "src"), str(tree)]
        for name in LOADED:
            importlib.import_module(name)
        for n, room in enumerate(rooms):
            share = args.number * (n + 1) // len(rooms) - args.number * n // len(rooms)
            seconds = _alone(room)
            figures: dict[str, list[str]] = {"killed": [], "not run": [], "survivors": []}
            for mutation in sorted(_mutations(tree, room, args.seed), key=lambda mutation: mutation.lot):
                if sum(map(len, figures.values())) == share:
                    break
                order = _order(tree, mutation, seconds)
                with _changed(mutation) as compiles:
                    if not compiles:
                        continue
                    is_killed = bool(order) and _is_killed(order, 4 * sum(seconds[test] for test in order) + 120)
                figures["killed" if is_killed else "survivors" if order else "not run"].append(mutation.told)
                print(room, "killed" if is_killed else "survived", len(order), mutation.told, file=sys.stderr)
            print(json.dumps({"room": room, "tests": len(seconds), **figures}), flush=True)


def _alone(room: str) -> dict[str, float]:
    """Seconds of a room's tests without a mutation. One that fails is left out: it would kill every mutation."""
    folders = [f"tests/{room}"] + ["tests/robustness"] * (room in READERS)
    tests = Tests(follow=coverage.Coverage(".coverage", config_file=False, include=[f"src/foreroute/{room}/*", RANKS]))
    assert _code(tests, folders, limit=7200) in (0, 1), f"{room}: {Path('output.txt').read_text()[-2000:]}"
    seconds = json.loads(Path("seconds.json").read_text())
    return {test: took for test, took in seconds.items() if took < math.inf}


def _order(tree: Path, mutation: Mutation, seconds: dict[str, float]) -> dict[str, Any]:
    """What tests that meet a mutation are sorted by: those that ran its lines first, file by file, cheapest first."""
    data = coverage.CoverageData(".coverage")
    data.read()
    by_line = data.contexts_by_lineno(str(tree / mutation.path))
    ran = {test for line in mutation.lines for test in by_line.get(line, ())}
    by_line = data.contexts_by_lineno(str(tree / RANKS))
    file_of = {test: test.partition("::")[0] for test in seconds}
    on_ranks = {file_of.get(test) for tests in by_line.values() for test in tests}
    files: defaultdict[str, float] = defaultdict(float)
    for test, took in seconds.items():
        files[file_of[test]] += took
    return {
        test: (test not in ran, files[file_of[test]], file_of[test], took)
        for test, took in seconds.items()
        # no test's lines are those of import
        if test in ran or not mutation.is_seen or "" in ran or file_of[test] in on_ranks
    }


@contextmanager
def _changed(mutation: Mutation) -> Iterator[bool]:
    """Whether the changed tree compiles, in which the body runs."""
    path, library, compiles = Path(mutation.path), Path(LIBRARY).read_bytes(), True
    source, status = path.read_bytes(), path.stat()
    path.write_bytes(source[: mutation.begin] + mutation.text.encode() + source[mutation.end :])
    if path.suffix != ".py":
        # what a mutation leaves unused is no error of it
        command = [sys.executable, "hatch_build.py", LIBRARY, "-Wno-error"]
        compiles = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield compiles
    path.write_bytes(source)
    Path(LIBRARY).write_bytes(library)
    # Python keeps what it compiled by the time of its file
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _is_killed(order: dict[str, Any], limit: float) -> bool:
    """Whether tests fail, or do not end within so many seconds."""
    code = _code(Tests(order), sorted({test.partition("::")[0] for test in order}), limit)
    return code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def _code(tests: Tests, folders: list[str], limit: float) -> int | None:
    """The exit code of pytest in a fork of this process; None where it does not end within so many seconds."""
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            with open("output.txt", "wb") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            os._exit(_run(tests, [name for name in folders if Path(name).exists()]))
        finally:
            os._exit(pytest.ExitCode.INTERNAL_ERROR)
    end = time.monotonic() + limit
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its ranks too
    if ended[0]:
        return os.waitstatus_to_exitcode(ended[1])
    os.waitpid(child, 0)
    return None


def _run(tests: Tests, folders: list[str]) -> int:
    """Run quick tests in this process: under coverage all of them, or up to the first that fails."""
    import hypothesis

    # a failure need not be made small
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("unshrunk", phases=phases, database=None)
    hypothesis.settings.load_profile("unshrunk")
    command = ["-q", "-n0", "-pno:cacheprovider", "--basetemp=tmp", "-mnot slow and not exhaustive", *folders]
    if (follow := tests.follow) is None:
        return pytest.main([*command, "-x"], plugins=[tests])
    follow.erase()
    with follow.collect():
        code = pytest.main(command, plugins=[tests])
    follow.save()
    Path("seconds.json").write_text(json.dumps(tests.seconds))
    return code


def _mutations(root: Path, room: str, seed: int) -> Iterator[Mutation]:
    """List every place of a room's files that can be changed."""
    files = (root / "src/foreroute" / room).rglob("*")
    for path in sorted(path for path in files if path.suffix in (".py", ".cpp", ".hpp")):
        source, name = path.read_bytes(), str(path.relative_to(root))
        if path.suffix != ".py":
            yield from _mutations_in_cpp(source, name, seed)
            continue
        starts = [0]
        for line in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        tree = ast.parse(source)
        annotations = {id(part) for node in ast.walk(tree) for part in _unexecuted(node)}
        # inner statements and functions come later, and stay
        whole = {id(part): node for node in ast.walk(tree) if isinstance(node, ast.stmt) for part in ast.walk(node)}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        around = {id(part): node for node in functions for body in node.body for part in ast.walk(body)}
        for node in ast.walk(tree):
            if id(node) in annotations or (text := _instead(node)) is None:
                continue
            begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            statement, function = whole[id(node)], around.get(id(node))
            below = [
                part.lineno for part in ast.walk(statement) if isinstance(part, ast.stmt) and part is not statement
            ]
            lines = range(
                statement.lineno, max(min(below, default=(statement.end_lineno or 0) + 1), statement.lineno + 1)
            )
            first, last = starts[lines[0] - 1], starts[lines[-1]]
            lot = hashlib.sha256(
                f"{seed} {name} {source[first:last].strip()!r} {begin - first} {text}".encode()
            ).digest()
            told = f"{name}:{node.lineno}: {' '.join(source[begin:end].decode().split())} -> {text}"  # type: ignore[attr-defined]
            yield Mutation(name, told, begin, end, text, lot, lines, is_seen=function is not None)


def _mutations_in_cpp(source: bytes, name: str, seed: int) -> Iterator[Mutation]:
    """List them line by line, but for comments, macros and what stands between a template's brackets."""
    begin = 0
    # a character for each byte
    for number, line in enumerate(source.decode("latin-1").splitlines(keepends=True), 1):
        code = "" if line.lstrip().startswith(("#", "template", "static_assert")) else line.partition("//")[0]
        whole = ""
        while whole != code:
            whole, code = code, re.sub(r"(?<=\w)<[^<>]*>", lambda found: " " * len(found[0]), code)
        for found in TOKEN.finditer(code):
            token = found[0]
            text = TOKENS.get(token) or str(int(token) + 1)
            lot = hashlib.sha256(f"{seed} {name} {line.strip()!r} {found.start()} {text}".encode()).digest()
            told = f"{name}:{number}: {line[: found.start()].lstrip()}[{token} -> {text}]{line[found.end() :].rstrip()}"
            place = begin + found.start()
            yield Mutation(name, told, place, place + len(token), text, lot, range(number, number + 1), is_seen=False)
        begin += len(line)


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
        new = new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, int):
        new.value += 1
    else:
        return None
    return f"({ast.unparse(new)})"


if __name__ == "__main__":
    main()
