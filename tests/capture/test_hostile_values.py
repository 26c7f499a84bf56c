"""Values of any kind in the place of what `decode` takes: one short error each, or the right answer."""

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


SCALARS = [None, True, 5, float("nan"), 10**5000, "", b"\xff", object(), Raises(), {1, 2}, range(3)]
OUTPUTS = [
    *((), DEEP, ENDLESS, [None], [Raises()], {"choices": DEEP}, {"choices": ENDLESS}, {"routed_experts": Raises()}),
    *({"meta_info": DEEP}, {"outputs": np.zeros(3)}, {"sglext": np.zeros(3)}),
    {"routed_experts": {"data": DEEP, "shape": DEEP, "dtype": DEEP}},
    {"meta_info": {"routed_experts": "AAAA", "output_token_sampling_mask": DEEP, "indexer_topk": DEEP}},
    *([[[{1: DEEP}]]], [[[10**5000]]], '{"a":' * 60_000, "[[[" + "1" * 5000 + "]]]", "\ud800"),
    SimpleNamespace(batch={"routed_experts": 1, "input_ids": 2, "attention_mask": 3}),
    *(np.array(5), np.array([None]), np.zeros((11, 4, 3), bool), np.zeros((11, 4, 3), "datetime64[s]")),
    np.full((11, 4, 3), 1 << 63, np.uint64),
    np.ma.masked_array(ROUTES, mask=ROUTES == 1),
    [{"meta_info": {"routed_experts": "AAAA"}}, [{"meta_info": {}}]],
]
IDS = {"ids": lambda value: type(value).__name__}


@pytest.mark.parametrize("output", [*SCALARS, *OUTPUTS], **IDS)
def test_hostile_output(output):
    with pytest.raises(CaptureError) as error:
        decode(output, model=R.spec, token_ids=R.tokens)
    assert len(str(error.value)) < 600


COMMON = [2.5, "1", [], object(), Raises(), np.array([1, 2]), DEEP, np.bool_(True), 10**5000]
NUMBERS = {"start": [*COMMON, -1, 12], "weight_version": [*COMMON, None, -2, 2**31]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NUMBERS for value in NUMBERS[name]], **IDS)
def test_hostile_numbers(name, value):
    with pytest.raises(CaptureError, match=f"{name}|position"):
        decode(ROUTES[1:], model=R.spec, token_ids=R.tokens, **{"start": 1, name: value})


TOKENS = [value for value in SCALARS if value is not None]
TOKENS += [[*R.tokens[:-1], last] for last in (True, 1.0, "7", None, -1, 2**31, 10**5000)]
TOKENS += [[], {}, set(R.tokens), DEEP, ENDLESS, [Raises()] * 12, [R.tokens, R.tokens], [[R.tokens]]]
TOKENS += [np.array(R.tokens, float), np.ones(12, bool), np.array(7)]


@pytest.mark.parametrize("tokens", TOKENS, **IDS)
def test_hostile_tokens(tokens):
    with pytest.raises(CaptureError, match="token") as error:
        decode(ROUTES, model=R.spec, token_ids=tokens)
    assert len(str(error.value)) < 400
