"""Checkpoint files: what goes in comes out, and what is not what was written is refused."""

import json
import resource
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foreroute.errors import RunFolderError
from foreroute.files import checksum, tensors_to_bytes
from foreroute.train.checkpoint import CHECKPOINT_FILE, Checkpoint, load_checkpoint, read_checkpoint, write_checkpoint
from tests.train.small_runs import same_state


def state_of(seed=0):
    """Everything that a trainer's state is made of."""
    torch.manual_seed(seed)
    shared = torch.randn(3, 4)
    return {
        "step": 7,
        "model": {
            "embed.weight": shared,
            "head.weight": shared,
            "router.bias": torch.randn(5).to(torch.bfloat16),
            "transposed": torch.randn(2, 6).T,
            "empty": torch.zeros(0, 3),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4, dtype=torch.float64)}, 2: {}},
            "param_groups": [
                {"lr": 1e-3, "betas": (0.9, 0.99), "params": [0, 1, 2], "foreach": None, "amsgrad": False}
            ],
        },
        "rollouts": {
            8: {"ids": torch.arange(6).to(torch.uint16), "mask": torch.tensor([True, False]), "why": ("ü", "\n")}
        },
        "scalars": [torch.tensor(5, dtype=torch.int64), torch.tensor(1.5, dtype=torch.bfloat16), float("nan"), 2**70],
    }


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "step-000007.safetensors"
    write_checkpoint(path, Checkpoint(state_of(), "c0", "d0"))
    return path


def plain(value):
    """Comparable with ==: types, shapes and bits."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).tolist())
    if isinstance(value, dict):
        return [(key, plain(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(each) for each in value])
    return repr(value)


def test_what_is_written_is_read_with_the_same_bits_types_and_order(path):
    read = read_checkpoint(path)
    assert plain(read.state) == plain(state_of())
    assert (read.config, read.metrics) == ("c0", "d0")
    assert load_checkpoint(path)["step"] == 7
    weights = read.state["model"]
    assert weights["embed.weight"].data_ptr() == weights["head.weight"].data_ptr(), "shared memory is stored once"
    weights["embed.weight"].add_(1)  # and can be written to


def test_views_of_one_memory_are_read_as_what_they_were(tmp_path):
    """Memory is shared where type, shape and strides are the same, too."""
    square = torch.arange(9.0).reshape(3, 3)
    model = {"w": square, "transposed": square.T, "bits": square.view(torch.int32), "row": square[0], "again": square}
    write_checkpoint(tmp_path / "views", Checkpoint({"step": 0, "model": model}, "", ""))
    read = load_checkpoint(tmp_path / "views")["model"]
    assert plain(read) == plain(model)
    assert read["again"].data_ptr() == read["w"].data_ptr() != read["transposed"].data_ptr()


def test_tensors_whose_places_read_alike_are_kept_apart(tmp_path):
    state = {"step": 0, "model": {"a/b": torch.zeros(2)}, "a": {"b/c": torch.ones(1)}, "a/b": {"c": torch.ones(3)}}
    write_checkpoint(tmp_path / "alike", Checkpoint(state, "", ""))
    assert plain(load_checkpoint(tmp_path / "alike")) == plain(state)


def test_the_same_state_is_the_same_file_and_an_ordinary_safetensors_file(path, tmp_path):
    again = tmp_path / "again"
    write_checkpoint(again, Checkpoint(state_of(), "c0", "d0"))
    assert again.read_bytes() == path.read_bytes()
    assert torch.equal(load_file(path)["model/embed.weight"], state_of()["model"]["embed.weight"])


def test_no_flipped_bit_is_read_as_something_else(path):
    """Every bit of the length of the header, and one of every fifth byte behind it."""
    written, expected, same = path.read_bytes(), plain(read_checkpoint(path).state), 0
    rng = np.random.default_rng(0)
    for position in [*range(8), *range(8, len(written), 5)]:
        for bit in range(8) if position < 8 else [rng.integers(8)]:
            damaged = bytearray(written)
            damaged[position] ^= 1 << int(bit)
            path.write_bytes(damaged)
            with suppress(RunFolderError):
                assert plain(read_checkpoint(path).state) == expected
                same += 1
    assert same == 0


def test_no_cut_and_no_longer_file_is_read(path):
    written = path.read_bytes()
    for damaged in (b"", written[:7], written[: len(written) // 2], written[:-1], written + b"\0", b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(RunFolderError, match="not a whole safetensors file"):
            read_checkpoint(path)


def test_a_checkpoint_that_was_renamed_to_another_step_is_refused(path):
    with pytest.raises(RunFolderError, match=r"step-000009\.safetensors is of step 7: it was renamed"):
        read_checkpoint(path.rename(path.with_name("step-000009.safetensors")))
    elsewhere = path.with_name("step-000009.safetensors").rename(path.with_name("start.safetensors"))
    assert read_checkpoint(elsewhere).state["step"] == 7


def test_what_is_no_checkpoint_is_refused_and_nothing_in_it_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save({"step": 0, "model": Trap()}, tmp_path / "pickled")
    (tmp_path / "folder").mkdir()
    for name in ("pickled", "folder", "missing"):
        with pytest.raises(RunFolderError, match=rf"{name} (is|does)"):
            load_checkpoint(tmp_path / name)


def forged(tree, tensors=None, **metadata):
    """A file whose checksum is right, whatever it says."""
    tensors = {"t": np.zeros(2, np.float32)} if tensors is None else tensors
    text = tree if isinstance(tree, str) else json.dumps(tree)
    held = {"checkpoint": str(CHECKPOINT_FILE.version), "state": text, "config": "", "metrics": "", **metadata}
    held = {f"foreroute.{key}": value for key, value in held.items()}
    return tensors_to_bytes({**held, "foreroute.checksum": checksum(held, tensors)}, tensors)


WEIGHT = {"tensor": "t"}


def tree(step=0, model=None, **others):
    model = {"dict": [["w", WEIGHT]]} if model is None else model
    return {"dict": [["step", step], ["model", model], *map(list, others.items())]}


def nested(depth, value=1):
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("nonsense", "not JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        (tree(rest=nested(70)), "nests deeper than 64"),
        ([WEIGHT], "its state is a list"),
        ({"dict": [["model", {"dict": [["w", WEIGHT]]}]]}, "its step is None"),
        (tree(step=-1), "its step is -1"),
        (tree(step=3.5), "its step is 3.5"),
        (tree(step=True), "its step is True"),
        (tree(model=WEIGHT), "no weights of a model"),
        (tree(model={"dict": [["w", 1]]}, rest=WEIGHT), "no weights of a model"),
        (tree(rest={"set": []}), "unknown form"),
        (tree(rest={"dict": [[1.5, 2]]}), "unknown form"),
        (tree(rest={"dict": {}}), "unknown form"),
        (tree(rest={"tensor": "other"}), "unknown form"),
        (tree(rest={"tensor": ["t"]}), "unknown form"),
        (tree(rest={"tensor": "t", "shape": [2]}), "unknown form"),
        (tree(rest={"tuple": [], "dict": 1}), "unknown form"),
        (tree(rest={"dict": [], "tuple": 1}), "unknown form"),
        (tree(rest={"dict": [[True, 1]]}), "unknown form"),
        (tree(rest={"dict": [["a", 1, 2]]}), "unknown form"),
        (tree(rest={"tensor": "t", "type": "bfloat16"}), "float32 is no 'bfloat16'"),
        (tree(rest={"tensor": "t", "type": ["x"]}), "is no"),
        (tree(rest={"tensor": "t", "scalar": True}), "said to have no axes"),
        (tree(rest={"tensor": "t", "scalar": 1}), "said to have no axes"),
        (tree(model={"dict": []}), "tensors that are not in its state: t"),
    ],
)
def test_a_forged_checkpoint_is_refused_with_what_is_wrong_in_it(tmp_path, content, reason):
    (tmp_path / "forged").write_bytes(forged(content))
    with pytest.raises(RunFolderError, match=reason):
        load_checkpoint(tmp_path / "forged")


@pytest.mark.parametrize("scalar", [1, "true", None])
def test_whether_a_tensor_has_no_axes_is_said_by_true_alone(tmp_path, scalar):
    (tmp_path / "forged").write_bytes(
        forged(tree(rest={"tensor": "t", "scalar": scalar}), {"t": np.zeros(1, np.float32)})
    )
    with pytest.raises(RunFolderError, match=r"of shape \[1\] is said to have no axes"):
        load_checkpoint(tmp_path / "forged")


def test_the_forger_can_write_a_right_one(tmp_path):
    """Otherwise the refusals above say nothing."""
    (tmp_path / "right").write_bytes(forged(tree(step=2)))
    assert same_state(load_checkpoint(tmp_path / "right"), {"step": 2, "model": {"w": torch.zeros(2)}})
    for key, message in (("checkpoint", "checkpoint file of version 3"), ("other", "its metadata are")):
        (tmp_path / "wrong").write_bytes(forged(tree(step=2), **{key: "3"}))
        with pytest.raises(RunFolderError, match=message):
            load_checkpoint(tmp_path / "wrong")


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(RunFolderError, match=r"cannot be written .File too large.; what was there before is whole"):
            write_checkpoint(path, replace(read_checkpoint(path), config="c1"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_checkpoint(path).config == "c0"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
