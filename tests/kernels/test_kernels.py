"""Compiled loops: what Python hands over arrives, what does not fit is refused, and make compiles what has changed."""

import importlib.util
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import foreroute.kernels
import hatch_build
from foreroute.testing.ranks import environment

PROBE = """
#include "kernels.hpp"

struct Inner {
    bool is_on;
    Array<const int16_t, 1> ids;
    bool is_last;
};

struct Outer {
    double scale;
    bool is_first;
    Inner inner;
    bool is_last;
    int64_t number;
    Array<const float, 2> table;
};

LOOP int64_t probe(const Outer &outer, bool flag, const Array<double, 2> &told) {
    const double seen[] = {double(outer.is_first), outer.scale, double(outer.inner.is_on && outer.inner.is_last),
                           double(outer.is_last), double(outer.number), double(flag), double(outer.inner.ids.length())};
    for (int64_t i = 0; i < 7; ++i) told(0, i) = seen[i];
    auto last = outer.table[outer.table.length() - 1];
    for (int64_t i = 0; i < last.length(); ++i) told(1, i) = last[i] * outer.inner.ids[i];
    return -told.size();
}

LOOP void words(int64_t seed, const Array<uint64_t, 1> &words) {
    uint64_t state = static_cast<uint64_t>(seed);
    for (int64_t i = 0; i < words.length(); ++i) words(i) = next_word(state);
}

LOOP double element(const Array<const double, 2> &array, int64_t i, int64_t j) { return array(i, j); }
"""


class Inner(NamedTuple):
    is_on: bool
    ids: np.ndarray
    is_last: bool


class Outer(NamedTuple):
    scale: float
    is_first: bool
    inner: Inner
    is_last: bool
    number: int
    table: np.ndarray


def loaded(file, source=foreroute.kernels.__file__):
    """`foreroute.kernels` with another library; "" has it look for its own."""
    spec = importlib.util.spec_from_file_location("other_kernels", source)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREROUTE_KERNELS", str(file))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Loops of this file, which check bounds."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copy(hatch_build.SOURCE / "kernels.hpp", folder)
    (folder / "probe.cpp").write_text(PROBE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hatch_build, "SOURCE", folder)
        hatch_build.compile_kernels(folder / "probe.so", "-DCHECK_BOUNDS")
    return folder / "probe.so"


@pytest.fixture
def kernels(library):
    return loaded(library)


@pytest.mark.parametrize("flags", [0b0110, 0b1001])
def test_structs_and_numbers_arrive_as_they_are(kernels, flags):
    """Every field of a struct in a struct, whatever the fields before it hold."""
    inner = kernels.StructOf(is_on=kernels.BOOL, ids=kernels.ArrayOf(np.int16, 1), is_last=kernels.BOOL)
    outer = kernels.StructOf(
        scale=kernels.FLOAT,
        is_first=kernels.BOOL,
        inner=inner,
        is_last=kernels.BOOL,
        number=kernels.INT,
        table=kernels.ArrayOf(np.float32, 2),
    )
    told = kernels.ArrayOf(np.float64, 2, filled=True)
    probe = kernels.compiled("probe", outer, kernels.BOOL, told, returns=kernels.INT)
    is_first, is_on, is_last, flag = (bool(flags >> i & 1) for i in range(4))
    table, ids, found = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([3, -2, 5], np.int16), np.zeros((2, 7))
    given = Outer(-0.25, is_first, Inner(is_on, ids, True), is_last, -(2**53), table)
    assert probe(given, flag, found) == -14
    assert found[0].tolist() == [is_first, -0.25, is_on, is_last, -(2**53), flag, 3]
    assert found[1].tolist() == [9, -8, 25, 0, 0, 0, 0]


UNFIT = {
    "dtype": np.zeros((2, 3), np.float32),
    "axes": np.zeros(6),
    "order": np.zeros((3, 2)).T,
    "not writable": np.broadcast_to(np.zeros((1, 3)), (1, 3)),
}


@pytest.mark.parametrize("fault", UNFIT)
def test_arrays_that_do_not_fit_are_refused(kernels, fault):
    array = kernels.ArrayOf(np.float64, 2, filled=True)
    element = kernels.compiled("element", array, kernels.INT, kernels.INT, returns=kernels.FLOAT)
    assert element(np.ones((2, 3)), 1, 2) == 1
    with pytest.raises(Exception, match=r"array.*expected"):
        element(UNFIT[fault], 0, 0)
    record = kernels.StructOf(is_on=kernels.BOOL, ids=array, is_last=kernels.BOOL)
    with pytest.raises(TypeError, match=r"array.*expected"):
        record.from_param(Inner(True, UNFIT[fault], True))


def test_random_words_are_those_of_splitmix64(kernels):
    """Of its author's program for the seed 1234567."""
    words = np.zeros(5, np.uint64)
    kernels.compiled("words", kernels.INT, kernels.ArrayOf(np.uint64, 1, filled=True))(1234567, words)
    assert words.tolist() == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


@pytest.mark.parametrize(("i", "j"), [(1, 2), (2, 0), (0, -1)])
def test_the_checked_library_ends_at_an_index_outside_of_an_array(library, i, j):
    code = (
        "import numpy as np; from foreroute.kernels import *; "
        "element = compiled('element', ArrayOf(np.float64, 2), INT, INT, returns=FLOAT); "
        f"print(element(np.arange(6.0).reshape(2, 3), {i}, {j}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(FOREROUTE_KERNELS=str(library)), capture_output=True, check=False
    )
    assert (ended.returncode, ended.stdout) == ((0, b"5.0\n") if (i, j) == (1, 2) else (-signal.SIGABRT, b""))


def test_a_library_of_other_sources_is_refused_in_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(hatch_build, "SOURCE", tmp_path)
    for name in ("kernels.py", "kernels.hpp"):
        shutil.copy(Path(foreroute.kernels.__file__).with_name(name), tmp_path)
    (tmp_path / "a.cpp").write_text('#include "kernels.hpp"')
    hatch_build.compile_kernels(tmp_path / "_kernels.so")
    loaded("", tmp_path / "kernels.py")
    with (tmp_path / "kernels.hpp").open("a") as file:
        file.write("// changed")
    with pytest.raises(ImportError, match=r"other sources.*make kernels"):
        loaded("", tmp_path / "kernels.py")
    loaded(tmp_path / "_kernels.so", tmp_path / "kernels.py")
