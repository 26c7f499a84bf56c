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

LOOP double element(const Array<const double, 2> &array, int64_t i, int64_t j) { return array(i, j); }
"""


class Inner(NamedTuple):
    is_on: bool
    ids: np.ndarray
    is_last: bool


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


UNFIT = {
    "dtype": np.zeros((2, 3), np.float32),
    "axes": np.zeros(6),
    "order": np.zeros((3, 2)).T,
    "not writable": np.broadcast_to(np.zeros((1, 3)), (1, 3)),
}


@pytest.mark.parametrize("unfit", UNFIT.values(), ids=UNFIT)
def test_arrays_that_do_not_fit_are_refused(library, unfit):
    kernels = loaded(library)
    array = kernels.ArrayOf(np.float64, 2, filled=True)
    element = kernels.compiled("element", array, kernels.INT, kernels.INT, returns=kernels.FLOAT)
    assert element(np.ones((2, 3)), 1, 2) == 1
    with pytest.raises(Exception, match=r"array.*expected"):
        element(unfit, 0, 0)
    record = kernels.StructOf(is_on=kernels.BOOL, ids=array, is_last=kernels.BOOL)
    with pytest.raises(TypeError, match=r"array.*expected"):
        record.from_param(Inner(True, unfit, True))


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
