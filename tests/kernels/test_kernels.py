"""Compiled kernels: kept on disk, compiled where they cannot be kept, thrown away by make when a source has changed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foreroute.kernels import kernel

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PROBE = """
from foreroute.kernels import kernel
from probe_constants import FACTOR

@kernel
def scaled(x):
    return x * FACTOR
"""
RUN = "from probe import scaled; print(scaled(2), sum(scaled.stats.cache_hits.values()))"


@pytest.fixture
def scaled(tmp_path):
    """A kernel that inlines a constant of another file; run in a process of its own, it says whether it was on disk."""
    (tmp_path / "probe.py").write_text(PROBE)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    # Python itself runs the bytecode of the old file when an edit keeps its size within one second
    environment = os.environ | {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}

    def run(factor):
        (tmp_path / "probe_constants.py").write_text(f"FACTOR = {factor}\n")
        ended = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True)
        return tuple(map(int, ended.stdout.split()))

    return run


@pytest.mark.slow
def test_a_kernel_is_kept_and_numba_does_not_see_a_constant_change(scaled, tmp_path):
    """The second is what make is for."""
    assert scaled(3) == (6, 0)
    assert scaled(3) == (6, 1)
    assert scaled(5) == (6, 1)
    shutil.rmtree(tmp_path / "cache")
    assert scaled(5) == (10, 0)


def test_a_kernel_that_cannot_be_kept_is_compiled():
    found = {}
    exec(compile("def twice(x):\n    return 2 * x", "<no file>", "exec"), found)
    assert kernel(found["twice"])(4) == 8


def test_make_empties_the_cache_when_a_source_of_kernels_changes_and_only_then(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "make", tmp_path / "make")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("")
    source, other = tmp_path / "src/foreroute/plan/options.py", tmp_path / "src/foreroute/train/loop.py"
    for path in (source, other):
        path.parent.mkdir(parents=True)
        path.write_text("a")

    def cache():
        """The folder that make hands to numba, made if it is not there."""
        (tmp_path / "asked.mk").write_text("kernels: $(KERNELS)\n\t@echo $$NUMBA_CACHE_DIR\n")
        command = ["make", "-sC", tmp_path, "-f", "Makefile", "-f", "asked.mk", "kernels"]
        # a make around the tests would have this one say which folder it enters
        alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        run = subprocess.run(command, capture_output=True, text=True, env=alone)
        assert run.returncode == 0, run.stderr
        return Path(run.stdout.strip())

    kept = cache() / "a.nbc"
    kept.write_text("")
    os.utime(source, (0, 0))
    other.write_text("b")
    assert cache() == kept.parent
    assert kept.exists()
    # of the same length, as a constant that is another number
    source.write_text("b")
    assert cache() != kept.parent
    assert not kept.exists()


def test_kernels_stand_in_and_take_from_nothing_but_what_make_looks_at():
    rooms = re.search(r"addprefix src/foreroute/,([a-z ]+)", MAKEFILE)[1].split()
    others = re.search(r"\n\t(benchmarks/.*)\n", MAKEFILE)[1].replace("/", ".").split()
    places = {"foreroute.kernels", *(f"foreroute.{room}" for room in rooms), *others}
    makes_kernels = re.compile(r"^from foreroute\.kernels import .*\b(kernel|routine|inlined)\b", re.MULTILINE)
    files = [path for folder in ("src", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    kernels = [path for path in files if makes_kernels.search(path.read_text()) and path != Path(__file__)]
    assert len(kernels) > 10
    for path in kernels:
        room = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("src.")
        imported = re.findall(r"^from ((?:foreroute|benchmarks|tests)\.\w+)", path.read_text(), re.MULTILINE)
        for name in [".".join(room.split(".")[:2]), *imported]:
            assert name in places | {"foreroute.errors"}, (
                f"{path}: {name} is not among the KERNEL_SOURCES of the Makefile"
            )
