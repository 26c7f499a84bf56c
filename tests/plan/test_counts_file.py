"""Counts from a file: what numpy wrote is read, and nothing else is trusted."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest

from foreroute.errors import CountsError
from foreroute.plan.counts import load_counts

COUNTS = np.arange(2 * 3 * 4 * 8).reshape(2, 3, 4, 8)


def member(array, **options):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asanyarray(array), **options)
    return stream.getvalue()


def archive(path, data, name="counts.npy", compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as written:
        written.writestr(name, data)
    return path


@pytest.mark.parametrize("dtype", ["<i4", ">i8", "u1", "<u2"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_wrote_is_read(tmp_path, dtype, order, save):
    counts = np.array(COUNTS, dtype, order=order)
    save(tmp_path / "c.npz", other=np.zeros(3), counts=counts)
    found = load_counts(tmp_path / "c.npz")
    assert found.dtype == counts.dtype
    assert np.array_equal(found, counts)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (COUNTS / 2, "counts are float64"),
        (COUNTS[0], r"counts are int64 \[3, 4, 8\]; expected integers"),
        (np.array([[[[{}]]]], object), "counts are object"),
        (COUNTS > 3, "counts are bool"),
    ],
)
def test_other_arrays_are_refused(tmp_path, array, message):
    with pytest.raises(CountsError, match=message):
        load_counts(archive(tmp_path / "c.npz", member(array)))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(CountsError, match="does not exist"):
        load_counts(tmp_path / "none.npz")
    with pytest.raises(CountsError, match="is a folder; expected a file"):
        load_counts(tmp_path)
    np.save(tmp_path / "c.npy", COUNTS)
    with pytest.raises(CountsError, match="not a readable"):
        load_counts(tmp_path / "c.npy")
    np.savez(tmp_path / "other.npz", loads=COUNTS)
    with pytest.raises(CountsError, match=r"holds loads.npy; expected an array called counts"):
        load_counts(tmp_path / "other.npz")
    with pytest.raises(CountsError, match=r"version \(2, 0\)"):
        load_counts(archive(tmp_path / "later.npz", member(COUNTS, version=(2, 0))))


def with_shape(shape):
    """The bytes of a member that states another shape than it holds."""
    data = member(COUNTS)
    size = struct.unpack("<H", data[8:10])[0]
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".ljust(size - 1) + "\n"
    assert len(header) == size
    return data[:10] + header.encode() + data[10 + size :]


@pytest.mark.parametrize("shape", ["(2, 3, 4, 9)", "(2, 3, 4, 7)", "(2000, 3000, 4, 8)", "(0, 3, 4, 8)"])
def test_a_size_that_is_not_there_is_refused_before_it_is_allocated(tmp_path, shape):
    with pytest.raises(CountsError, match="the file is damaged"):
        load_counts(archive(tmp_path / "c.npz", with_shape(shape)))


@pytest.mark.parametrize("shape", ["(-1, 3, 4, 8)", "(99999, 9999, 99, 99)"])
def test_a_size_that_cannot_be_is_refused(tmp_path, shape):
    with pytest.raises(CountsError, match="entries at most"):
        load_counts(archive(tmp_path / "c.npz", with_shape(shape)))


def test_a_directory_that_lies_about_the_size_is_refused(tmp_path):
    """The zip's own tables state a size that such a small stream cannot have."""
    path = archive(tmp_path / "c.npz", with_shape("(2000, 3000, 4, 8)"))
    raw = bytearray(path.read_bytes())
    stated = struct.pack("<I", len(member(COUNTS)))
    header = len(member(COUNTS)) - COUNTS.nbytes
    lie = struct.pack("<I", header + 2000 * 3000 * 4 * 8 * 8)
    central = raw.find(b"PK\x01\x02")
    assert raw[central + 24 : central + 28] == stated
    raw[central + 24 : central + 28] = lie
    path.write_bytes(raw)
    with pytest.raises(CountsError, match="nearly all 0 uncompressed"):
        load_counts(path)


def test_zeros_that_take_a_thousand_times_their_file_are_refused(tmp_path):
    zeros = np.zeros((64, 64, 64, 128), np.int32)
    np.savez_compressed(tmp_path / "c.npz", counts=zeros)
    with pytest.raises(CountsError, match=r"store counts that are nearly all 0 uncompressed, with numpy\.savez"):
        load_counts(tmp_path / "c.npz")
    np.savez(tmp_path / "u.npz", counts=zeros)
    assert load_counts(tmp_path / "u.npz").shape == zeros.shape


@pytest.mark.parametrize(
    "text", ["(" * 9000, "-" * 9000 + "1", "[" * 150 + "]" * 150, "'", "{'descr': 0}", "\x00", "é"]
)
def test_headers_in_pythons_syntax_are_taken_to_be_hostile(tmp_path, text):
    header = (text + "\n").encode("latin1")
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64)
    with pytest.raises(CountsError, match="not a readable"):
        load_counts(archive(tmp_path / "c.npz", data))


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused_before_they_are_opened(tmp_path, compression):
    with pytest.raises(CountsError, match=r"write them with numpy\.savez"):
        load_counts(archive(tmp_path / "c.npz", member(COUNTS), compression=compression))


def test_a_folder_a_fifo_and_a_path_that_is_none_are_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", "/dev/zero", "\0", "x" * 5000):
        with pytest.raises(CountsError, match=r"expected a file|cannot be opened"):
            load_counts(path)


def test_damage_is_an_error_and_never_another_array(tmp_path):
    path = tmp_path / "c.npz"
    np.savez_compressed(path, counts=COUNTS)
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(raw)
        if rng.random() < 0.3:
            del damaged[int(rng.integers(len(raw))) :]
        else:
            damaged[int(rng.integers(len(raw)))] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            assert np.array_equal(load_counts(path), COUNTS)
        except CountsError:
            refused += 1
    assert refused > 200
