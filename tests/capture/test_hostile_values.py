"""Hostile values for every argument of every public function of the room: one clear error each, or the right answer."""

from types import SimpleNamespace

import numpy as np
import pytest

from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires

R = wires.rollout(np.random.default_rng(10))
ROUTES = R.routes_RLK


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
ENDLESS: list = []
ENDLESS.append(ENDLESS)


class Raises:
    """An object of which nothing can be asked."""

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")

    def __repr__(self):
        raise RuntimeError("no repr")


class LyingMapping(dict):
    """Names what it does not hold."""

    def keys(self):
        return {"data", "shape", "dtype"}

    def __getitem__(self, name):
        raise OSError("gone")


class LyingArray:
    shape = (11, 4, 3)
    dtype = np.dtype("int64")

    def __array__(self, *_args, **_kwargs):
        raise ArithmeticError("no array")


class LyingShape(LyingArray):
    shape = None


class LyingList(list):
    def __len__(self):
        return 3

    def __bool__(self):
        return True


class LastingList(list):
    def __iter__(self):
        raise OSError("no items")


class Field:
    """A tensor dictionary: it has a shape and a dtype, and is no array."""

    def __init__(self, fields):
        self._fields = fields
        self.shape, self.dtype = (1,), None

    def __getitem__(self, name):
        return self._fields[name]


class FieldLikeAnArray(Field):
    """One that numpy would ask for an array, as some libraries have it. Its keys tell it apart."""

    def keys(self):
        return self._fields.keys()

    def __array__(self, *_args, **_kwargs):
        raise TypeError("fields of several types are no array")


RELEASED = memoryview(b"123")
RELEASED.release()
SCALARS = [
    *(None, True, 5, -1, 2.5, float("nan"), 1j, 10**5000, "", "x", b"", b"\xff"),
    *(object(), Raises(), {1, 2}, range(3)),
]
CONTAINERS = [
    *((), DEEP, ENDLESS, [None], [Raises()], LyingMapping(), LyingArray(), LyingShape(), LyingList(), RELEASED),
    *(LastingList([1]), [[LastingList([1])]], [[LyingList([1])]], [[[1, 2]], LastingList([1])]),
    *({"choices": DEEP}, {"choices": ENDLESS}, {"routed_experts": DEEP}, {"routed_experts": Raises()}),
    *({"meta_info": DEEP}, {"outputs": np.zeros(3)}, {"sglext": np.zeros(3)}),
    {"routed_experts": {"data": DEEP, "shape": DEEP, "dtype": DEEP}},
    {"meta_info": {"routed_experts": "AAAA", "output_token_sampling_mask": DEEP, "indexer_topk": DEEP}},
    {"routed_experts": np.zeros((1, 2, 1, 1), int), "input_ids": Raises(), "attention_mask": None},
    *([[[{1: DEEP}]]], [[[10**5000]]], '{"a":' * 60_000, "[[[" + "1" * 5000 + "]]]", "\ud800"),
    *(SimpleNamespace(outputs=[Raises()]), SimpleNamespace(outputs=LastingList([1]))),
    SimpleNamespace(batch={"routed_experts": 1, "input_ids": 2, "attention_mask": 3}),
    *(np.array(5), np.array([None]), np.zeros((11, 4, 3), bool), np.zeros((11, 4, 3), "datetime64[s]")),
    *(np.zeros((11, 4, 3), "V4"), np.full((11, 4, 3), 1 << 63, np.uint64)),
    np.ma.masked_array(ROUTES, mask=ROUTES == 1),
    [np.zeros((11, 4, 3), int), [[[1]]]],
    [{"meta_info": {"routed_experts": "AAAA"}}, [{"meta_info": {}}]],
]
IDS = {"ids": lambda value: type(value).__name__}


@pytest.mark.parametrize("output", [*SCALARS, *CONTAINERS], **IDS)
def test_hostile_output(output):
    with pytest.raises(CaptureError) as error:
        decode(output, model=R.spec, token_ids=R.tokens)
    assert len(str(error.value)) < 600


COMMON = [2.5, float("nan"), "1", b"1", [], {}, object(), Raises(), np.array([1, 2]), DEEP, np.bool_(True), 1.0]
NUMBERS = {"start": [*COMMON, np.float64(1), 10**5000, -1, 12], "weight_version": [*COMMON, None, 10**5000, -2, 2**31]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NUMBERS for value in NUMBERS[name]], **IDS)
def test_hostile_numbers(name, value):
    with pytest.raises(CaptureError, match=f"{name}|position"):
        decode(ROUTES[1:], model=R.spec, token_ids=R.tokens, **{"start": 1, name: value})


TOKENS = [value for value in SCALARS if value is not None]
TOKENS += [[*R.tokens[:-1], last] for last in (True, 1.0, "7", None, -1, 2**31, 10**5000)]
TOKENS += [[], {}, dict.fromkeys(R.tokens), set(R.tokens), iter(R.tokens), LastingList(R.tokens)]
TOKENS += [DEEP, ENDLESS, [DEEP], [Raises()] * 12, [R.tokens, R.tokens], [[R.tokens]], LyingArray(), LyingShape()]
TOKENS += [np.array(R.tokens, kind) for kind in (float, object)]
TOKENS += [np.ones(12, bool), np.array([[R.tokens]]), np.array(7)]


@pytest.mark.parametrize("tokens", TOKENS, **IDS)
def test_hostile_tokens(tokens):
    with pytest.raises(CaptureError, match="token") as error:
        decode(ROUTES, model=R.spec, token_ids=tokens)
    assert len(str(error.value)) < 400
    with pytest.raises(CaptureError):
        decode({"routed_experts": ROUTES, "prompt_token_ids": [], "token_ids": tokens}, model=R.spec)


def test_masks_of_verl_are_bools_or_0_and_1_without_holes():
    batch = wires.verl([R])
    mask = batch["attention_mask"]
    for kind in (bool, np.uint8):
        assert decode({**batch, "attention_mask": mask.astype(kind)}, model=R.spec).valid_N.sum() == 11
    for wrong in (mask * 1.0, 2 * mask, -mask, mask * (np.arange(12) != 4)):
        with pytest.raises(CaptureError, match="attention_mask"):
            decode({**batch, "attention_mask": wrong}, model=R.spec)


@pytest.mark.parametrize("kind", [Field, FieldLikeAnArray])
def test_a_tensor_dictionary_is_a_batch_and_not_an_array(kind):
    batch = kind(wires.verl([R]))
    trace = decode(batch, model=R.spec)
    assert trace.valid_N.sum() == 11
    assert trace.provenance["wire"] == "verl"
