"""Whatever path the doctor is given: one message, exit code 2, and nothing waits, grows or reaches a terminal raw."""

import json
import os
import signal
import tracemalloc

import numpy as np
import pytest
import tomli_w

import foreroute as fr
from foreroute.capture import save_generation
from foreroute.cli.doctor_inputs import MOST_VALUES, read_array
from foreroute.errors import InputError
from foreroute.testing.models import tiny
from tests.cli.command import foreroute
from tests.doctor.doctor_cases import generation
from tests.train.small_runs import small_values

HOSTILE = "\x1b]0;title\x07\u202e.npy"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Everything that the doctor can be given, whole."""
    folder = tmp_path_factory.mktemp("paths")
    model = tiny("qwen3_moe")
    good = generation(model, sequences=2)
    model.save_pretrained(folder / "model")
    save_generation(good, folder / "rollout.safetensors")
    fr.save(good.trace, folder / "trace.safetensors")
    np.save(folder / "logprobs.npy", good.logprobs_R)
    np.save(folder / "lengths.npy", good.prompt_lengths)
    (folder / "run.toml").write_text(tomli_w.dumps(small_values()))
    return folder


class Waits(BaseException):
    """Nothing catches it on its way."""


@pytest.fixture(autouse=True)
def nobody_waits():
    """A FIFO or a device that is opened and read would wait, or go on, for ever."""

    def too_late(number, frame):
        raise Waits("for an input that never ends")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def of_option(option, path, files):
    """A whole command in which one path is another."""
    trace, logprobs = files / "trace.safetensors", files / "logprobs.npy"
    return {
        "--trace": ["--trainer-trace", trace, "--trace", path],
        "--trainer-trace": ["--trace", trace, "--trainer-trace", path],
        "--generation": ["--trainer-logprobs", logprobs, "--generation", path],
        "--logprobs": ["--trainer-logprobs", logprobs, "--logprobs", path],
        "--trainer-logprobs": ["--logprobs", logprobs, "--trainer-logprobs", path],
        "--replayed-logprobs": ["--logprobs", logprobs, "--trainer-logprobs", logprobs, "--replayed-logprobs", path],
        "--prompt-lengths": [
            "--model",
            files / "model",
            "--trace",
            trace,
            "--logprobs",
            logprobs,
            "--prompt-lengths",
            path,
        ],
        "--model": ["--model", path],
        "--checkpoint": ["--model", files / "run.toml", "--checkpoint", path],
    }[option]


def missing(folder, whole):
    return folder / "nothing.toml"


def dangling(folder, whole):
    (folder / "link.toml").symlink_to(folder / "nowhere")
    return folder / "link.toml"


def empty_folder(folder, whole):
    (folder / "folder").mkdir()
    return folder / "folder"


def fifo(folder, whole):
    os.mkfifo(folder / "fifo.toml")
    return folder / "fifo.toml"


def device(folder, whole):
    return "/dev/zero"


def link_to_device(folder, whole):
    (folder / "zero.toml").symlink_to("/dev/zero")
    return folder / "zero.toml"


def empty_file(folder, whole):
    (folder / "empty.toml.npy").write_bytes(b"")
    return folder / "empty.toml.npy"


def cut_file(folder, whole):
    content = whole.read_bytes() if whole.is_file() else b'{"model_type": "qwen'
    path = folder / f"cut{whole.suffix}"
    path.write_bytes(content[: len(content) // 2])
    return path


def not_text(folder, whole):
    (folder / "bytes.toml").write_bytes(bytes(range(256)))
    return folder / "bytes.toml"


def control_characters(folder, whole):
    (folder / HOSTILE).write_bytes(b"\x93NUMPY")
    return folder / HOSTILE


def not_utf8(folder, whole):
    path = os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.npy")
    with open(path, "wb") as file:
        file.write(b"no array")
    return path


KINDS = [
    missing, dangling, empty_folder, fifo, device, link_to_device, empty_file, cut_file, not_text, control_characters,
    not_utf8,
]  # fmt: skip
WHOLE = {
    "--trace": "trace.safetensors",
    "--trainer-trace": "trace.safetensors",
    "--generation": "rollout.safetensors",
    "--logprobs": "logprobs.npy",
    "--trainer-logprobs": "logprobs.npy",
    "--replayed-logprobs": "logprobs.npy",
    "--prompt-lengths": "lengths.npy",
    "--model": "model",
    "--checkpoint": "rollout.safetensors",
}


@pytest.mark.parametrize(
    ("option", "kind"),
    # every kind with an option of each reader, and every option with what would wait, be missing or be damaged
    [
        (option, kind)
        for option in WHOLE
        for kind in KINDS
        if option in ("--trace", "--logprobs", "--model", "--checkpoint") or kind in (missing, fifo, cut_file)
    ],
)
def test_a_path_to_nothing_that_can_be_read_is_one_message(option, kind, files, tmp_path):
    path = kind(tmp_path, files / WHOLE[option])
    result = foreroute("doctor", *of_option(option, path, files))
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert result.stderr.count("error") >= 1
    assert "Traceback" not in result.stderr
    assert not [letter for letter in result.stderr + result.stdout if letter in "\x1b\x07\u202e"]


def header(text, size=64):
    raw = text.encode()
    length = -(-(10 + len(raw) + 1) // size) * size - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + raw + b" " * (length - len(raw) - 1) + b"\n"


def stated(shape, dtype="<f4"):
    return header(f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}")


BAD_ARRAYS = {
    "a bomb": stated("(1000000000000,)"),
    "a product that wraps": stated(f"({2**62},)", "<f8"),
    "cut": stated("(100,)") + bytes(399),
    "longer": stated("(100,)") + bytes(401),
    "two axes": stated("(10, 10)") + bytes(400),
    "no axis": stated("()") + bytes(4),
    "a negative axis": stated("(-4,)"),
    "objects": stated("(1,)", "|O") + b"cos\nsystem\n(S'true'\ntR.",
    "text": stated("(1,)", "<U1") + bytes(4),
    "records": header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }") + bytes(4),
    "a float of three bytes": stated("(1,)", "<f3") + bytes(3),
    "a header of nested brackets": header("(" * 60_000),
    "a header of signs": header("{'descr': " + "-" * 60_000),
    "a header that is cut": stated("(1,)")[:40],
    "a header of another length": b"\x93NUMPY\x01\x00\xff\xff" + stated("(1,)")[10:] + bytes(4),
    "version 2": b"\x93NUMPY\x02\x00" + stated("(1,)")[8:] + bytes(4),
    "a pickle": b"\x80\x04N.",
    "an archive": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_that_are_none_are_refused_before_anything_is_allocated(name, tmp_path):
    path = tmp_path / "array.npy"
    path.write_bytes(BAD_ARRAYS[name])
    tracemalloc.start()
    with pytest.raises(InputError, match=r"array\.npy"):
        read_array(path, "f")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_sparse_file_of_more_values_than_anybody_samples_is_refused_unread(tmp_path):
    path = tmp_path / "sparse.npy"
    begin = stated(f"({MOST_VALUES + 1},)")
    with open(path, "wb") as file:
        file.write(begin)
        file.truncate(len(begin) + 4 * (MOST_VALUES + 1))
    with pytest.raises(InputError, match="values at most"):
        read_array(path, "f")


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8", ">f8"])
def test_floats_of_any_width_and_order_are_read(dtype, tmp_path):
    values = np.linspace(-3, 0, 7).astype(dtype)
    np.save(tmp_path / "a.npy", values)
    read = read_array(tmp_path / "a.npy", "f")
    np.testing.assert_array_equal(read, values)
    assert read.dtype.isnative


@pytest.mark.parametrize("dtype", ["|u1", "<i4", ">i8", "<u8"])
def test_integers_of_any_width_and_order_are_read(dtype, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5).astype(dtype))
    assert read_array(tmp_path / "a.npy", "iu").tolist() == [0, 1, 2, 3, 4]


def test_the_name_of_a_model_is_never_printed_raw(files, tmp_path):
    folder = tmp_path / "m\x1b[2J\u202eodel"
    folder.mkdir()
    config = json.loads((files / "model" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "\x1b[2J\u202e"}))
    page = tmp_path / "page.html"
    result = foreroute("doctor", "--model", folder, "--output", page)
    assert result.returncode == 0, result.stderr
    assert not [letter for letter in result.stderr + result.stdout + page.read_text() if letter in "\x1b\x07\u202e"]


def test_a_configuration_whose_data_is_gone_is_one_message(files, tmp_path):
    model = {"tokenizer": str(tmp_path / "none"), **small_values()["model"]}
    task = {"kind": "dataset", "data": str(tmp_path / "none.jsonl"), "reward": "exact_match"}
    (tmp_path / "run.toml").write_text(tomli_w.dumps({"name": "a", "model": model, "task": task}))
    result = foreroute("doctor", "--model", tmp_path / "run.toml")
    assert (result.returncode, result.stderr.count("error")) == (2, 1), result.stderr
