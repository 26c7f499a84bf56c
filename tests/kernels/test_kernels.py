"""Compiled kernels on disk: never stale, never run when damaged or written by others, and never in the way."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest

import foreroute
from foreroute import kernels
from foreroute.kernels import kernel

SOURCES = Path(foreroute.__file__).parent
PROBE = """
import numba

from foreroute.kernels import kernel
from foreroute.probe_between import FACTOR


def scaled(x):
    return x * FACTOR


ours = kernel(scaled)
plain = numba.njit(cache=True)(scaled)
"""
RUN = "from foreroute.probe import ours, plain; print(ours(2), plain(2), sum(ours.stats.cache_hits.values()))"


class Pair(NamedTuple):
    first: int
    second: int


class Turned(NamedTuple):
    second: int
    first: int


Turned.__name__ = Turned.__qualname__ = "Pair"


def picked(values, at):
    return values[at]


def first_of(pair):
    return pair.first


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def hits(function, *arguments):
    """The answer of a kernel made anew, as a new process makes it, and whether it was on disk."""
    made = kernel(function)
    return made(*arguments), sum(made.stats.cache_hits.values())


def test_an_edit_of_a_file_whose_constant_is_inlined_compiles_anew(tmp_path):
    package = shutil.copytree(SOURCES, tmp_path / "foreroute", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "probe.py").write_text(PROBE)
    (package / "probe_between.py").write_text("from foreroute.probe_constants import (\n    FACTOR,\n)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    # Python itself runs the bytecode of the old file when an edit keeps its size within one second.
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    seen = []
    for factor in (3, 3, 5):
        (package / "probe_constants.py").write_text(f"FACTOR = {factor}\n")
        run = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True)
        seen.append(run.stdout.split())
    # the last of numba's own is the old product
    assert seen == [["6", "6", "0"], ["6", "6", "1"], ["10", "6", "0"]]


def test_no_kernel_of_the_package_is_kept_by_numba_itself():
    for path in SOURCES.rglob("*.py"):
        assert not re.search(r"cache\s*=\s*True", "".join(re.findall(r"njit\([^)]*\)", path.read_text()))), path


@pytest.mark.parametrize("kept", [0, 1, 31, 32, 33, 0.5, -1])
def test_a_kernel_file_cut_short_is_compiled_anew(folder, kept):
    values = np.arange(4)
    assert hits(picked, values, 1) == (1, 0)
    (file,) = folder.rglob("*.kernel")
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept) if isinstance(kept, float) else kept])
    assert hits(picked, values, 1) == (1, 0)
    assert hits(picked, values, 1) == (1, 1)


def test_a_kernel_file_with_a_flipped_bit_is_compiled_anew(folder):
    values = np.arange(4)
    hits(picked, values, 1)
    (file,) = folder.rglob("*.kernel")
    whole = file.read_bytes()
    places = [0, 40, *np.random.default_rng(0).integers(len(whole), size=10).tolist()]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        assert hits(picked, values, 1) == (1, 0)
    assert hits(picked, values, 1) == (1, 1)


def test_a_kernel_file_that_others_may_write_or_own_is_not_read(folder):
    values = np.arange(4)
    hits(picked, values, 1)
    (file,) = folder.rglob("*.kernel")
    for mode in (0o664, 0o646):
        file.chmod(mode)
        assert hits(picked, values, 1) == (1, 0)
        assert file.stat().st_mode & 0o777 == 0o644
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        assert hits(picked, values, 1) == (1, 0)
    assert hits(picked, values, 1) == (1, 1)


def test_something_else_in_the_place_of_a_kernel_file_is_neither_opened_nor_replaced(folder):
    values = np.arange(4)
    hits(picked, values, 1)
    (file,) = folder.rglob("*.kernel")
    file.unlink()
    os.mkfifo(file)
    assert hits(picked, values, 1) == (1, 0)
    assert file.is_fifo()


def test_how_numba_is_set_to_compile_is_minded(folder, monkeypatch):
    values = np.arange(4)
    assert hits(picked, values, 1) == (1, 0)
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    with pytest.raises(IndexError):
        kernel(picked)(values, 4)
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", None)
    assert hits(picked, values, 1) == (1, 1)
    for name in ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE"):
        was = getattr(numba.config, name)
        monkeypatch.setattr(numba.config, name, type(was)(not was))
        assert hits(picked, values, 1) == (1, 0), name
        monkeypatch.setattr(numba.config, name, was)
        assert hits(picked, values, 1) == (1, 1), name


def test_named_tuples_whose_fields_changed_places_are_other_types(folder):
    assert hits(first_of, Pair(1, 2)) == (1, 0)
    assert hits(first_of, Turned(second=1, first=2)) == (2, 0)
    assert hits(first_of, Pair(1, 2)) == (1, 1)


def test_where_nothing_can_be_kept_kernels_are_compiled(folder, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "write_atomically", full)
        assert hits(picked, np.arange(4), 1) == (1, 0)
    assert not list(folder.rglob("*.kernel"))
    # as with a read-only installation of a user without a home
    monkeypatch.setattr(numba.core.caching.CompileResultCacheImpl, "_locator_classes", [])
    assert hits(picked, np.arange(4), 1) == (1, 0)
