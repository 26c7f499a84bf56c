"""Every integer type of numpy and torch is an integer type, at every door that takes routes as arrays."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import CaptureError, TraceContentError
from foreroute.mismatch import routing_mismatch
from tests import wires

torch = pytest.importorskip("torch")

TYPES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
LIBRARIES = {"numpy": np.asarray, "torch": torch.from_numpy}
R = wires.rollout(np.random.default_rng(12), experts=128)
KNOWN = fr.RoutingTrace.from_sequences(R.spec, [R.tokens], [R.routes_RLK])
ABSENT = np.full((1, 4, 3), -1)

DOORS = {
    "decode": lambda rows: fr.capture.decode(rows, model=R.spec, token_ids=R.tokens),
    "answer": lambda rows: fr.capture.decode(
        {"prompt_token_ids": R.prompt, "choices": [{"token_ids": R.response, "routed_experts": rows[:-1]}]},
        model=R.spec,
    ),
    "from_sequences": lambda rows: fr.RoutingTrace.from_sequences(R.spec, [R.tokens], [rows]),
    "from_padded": lambda rows: fr.RoutingTrace.from_padded(R.spec, np.array([R.tokens]), rows[None]),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("door", DOORS)
def test_routes_of_any_integer_type_are_read(door, dtype, library):
    """The last row is -1, as a type without a sign has it."""
    rows = np.concatenate([R.routes_RLK, ABSENT]).astype(dtype)
    assert DOORS[door](LIBRARIES[library](rows)).equals(KNOWN)


@pytest.mark.parametrize("given", [{}, {"spec": R.spec}], ids=["any model", "a spec"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", TYPES)
def test_sides_of_different_types_are_compared(dtype, library, given):
    rows = np.concatenate([R.routes_RLK, ABSENT])
    other = rows.copy()
    other[4, 2] = next(ids for ids in R.routes_RLK[:, 2] if not set(ids) & set(rows[4, 2]))
    found = fr.compare(
        np.full((1, 12), -1.0),
        np.full((1, 12), -1.0),
        np.ones((1, 12)),
        trainer_routes=LIBRARIES[library](rows.astype(dtype)[None]),
        engine_routes=other[None],
        **given,
    )
    assert found.metrics["routed_rows"] == 11
    assert found.metrics["differing_share"] == 1 / 44
    again = routing_mismatch(
        LIBRARIES[library](other.astype(dtype)[None]), LIBRARIES[library](rows.astype(dtype)[None])
    )
    assert (again.rows, int(again.differing_L.sum())) == (11, 1)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_the_highest_number_in_part_is_no_gap(dtype):
    rows = R.routes_RLK.astype(dtype)
    rows[3, 1] = np.iinfo(dtype).max
    with pytest.raises(CaptureError, match=rf"ids from 0 to {np.iinfo(dtype).max}|ids from 1 to {np.iinfo(dtype).max}"):
        fr.capture.decode(rows, model=R.spec, token_ids=R.tokens)


def test_with_one_pick_the_highest_number_is_an_expert():
    r = wires.rollout(np.random.default_rng(13), experts=256, top_k=1)
    rows = r.routes_RLK.astype(np.uint8)
    rows[3] = 255
    assert fr.capture.decode(rows, model=r.spec, token_ids=r.tokens).valid_N.sum() == 11
    narrow = wires.rollout(np.random.default_rng(13), experts=200, top_k=1)
    with pytest.raises(TraceContentError, match="ids from 255 to 255; expected 0 to 199"):
        fr.RoutingTrace.from_sequences(narrow.spec, [[1, 2]], [np.full((1, 4, 1), 255, np.uint8)])
