"""Counts survive the disk; other files, other versions and damage are refused."""

import numpy as np
import pytest

from foreroute.errors import CountsError
from foreroute.files import FileFormat, TensorSchema
from foreroute.plan.counts import COUNTS_FILE, load_counts, save_counts

COUNTS = np.arange(2 * 3 * 4 * 8).reshape(2, 3, 4, 8)


@pytest.mark.parametrize("dtype", ["<i4", ">i8", "u1", "<u2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_round_trip(tmp_path, dtype, order):
    counts = np.array(COUNTS, dtype, order=order)
    found = load_counts(save_counts(counts, tmp_path / "c"))
    assert found.dtype == np.int32
    assert np.array_equal(found, counts)


def test_existing_files_are_kept(tmp_path):
    path = save_counts(COUNTS, tmp_path / "c")
    with pytest.raises(CountsError, match="overwrite=True"):
        save_counts(COUNTS + 1, path)
    assert np.array_equal(load_counts(path), COUNTS)
    save_counts(COUNTS + 1, path, overwrite=True)
    assert np.array_equal(load_counts(path), COUNTS + 1)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (COUNTS / 2, "counts are of dtype float64"),
        (COUNTS[0], "counts have shape"),
        (-COUNTS, "the entry -191 in micro-step 1"),
    ],
)
def test_what_is_no_counts_is_not_written(tmp_path, counts, message):
    with pytest.raises(CountsError, match=message):
        save_counts(counts, tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (COUNTS, "tensor counts_MLGE is int64; expected I32"),
        (COUNTS[0].astype(np.int32), r"has the shape \[3, 4, 8\]; expected \[M, L, G, E\]"),
        ((COUNTS - 1).astype(np.int32), "c: counts have the entry -1 in micro-step 0"),
        (COUNTS[..., :6].astype(np.int32), "6 experts cannot be placed evenly on 4 ranks"),
    ],
)
def test_a_forged_file_is_refused(tmp_path, counts, message):
    forger = FileFormat("counts", 1, CountsError, (), None, "")
    forger.write(tmp_path / "c", {}, {"counts_MLGE": counts}, overwrite=False)
    with pytest.raises(CountsError, match=message):
        load_counts(tmp_path / "c")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(CountsError, match="does not exist"):
        load_counts(tmp_path / "none")
    with pytest.raises(CountsError, match="is a folder; expected a file"):
        load_counts(tmp_path)
    np.savez(tmp_path / "c.npz", counts=COUNTS)
    with pytest.raises(CountsError, match="not a whole safetensors file"):
        load_counts(tmp_path / "c.npz")


def test_the_file_is_what_the_page_says():
    assert COUNTS_FILE.tensors == {"counts_MLGE": TensorSchema("I32", "MLGE")}
