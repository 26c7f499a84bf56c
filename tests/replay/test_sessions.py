"""Every property of sessions, of models of every framework.

A property that holds for every kind of gate or every way of recomputing activations is asked of the usual one and of a
few others at once, of which each property has its own; by night of all. `make test` asks all of transformers and
a few of Megatron-Core, and CI all of both.
"""

import pytest

from tests.adapters.hf.session_subject import HuggingFaceSubject
from tests.adapters.megatron.forked_ranks import run
from tests.replay.session_properties import OVER_VARIANTS, PROPERTIES, at_once, in_full

IN_PARTS = [
    *(pytest.param(name, at_once, id=name) for name in PROPERTIES),
    *(pytest.param(name, in_full, id=f"{name}, in full", marks=pytest.mark.exhaustive) for name in OVER_VARIANTS),
]
"""Every property, and those over all variants once more."""
SOONER = {
    "own_routes_change_no_bit_and_others_are_followed",
    "rows_without_a_route_are_routed_by_the_model_and_others_as_given",
    "a_recording_is_what_experts_were_given_in_the_order_of_forwards",
    "a_batch_of_other_sequences_is_refused",
}
"""What `make test` asks of Megatron-Core too."""
OF_MEGATRON = [
    each if each.marks or each.values[0] in SOONER else pytest.param(*each.values, id=each.id, marks=pytest.mark.slow)
    for each in IN_PARTS
]


@pytest.mark.parametrize(("name", "part"), IN_PARTS)
def test_of_transformers(name, part):
    PROPERTIES[name](part(HuggingFaceSubject, name))


@pytest.fixture(scope="module")
def failures(request):
    """By name and part, the traceback of each property that does not hold of Megatron-Core; asked in one process."""
    asked = [item for item in request.session.items if item.path == request.path and "failures" in item.fixturenames]
    [failed] = run("one_rank.failures", [tuple(item.callspec.params.values()) for item in asked], timeout=400)
    return failed


@pytest.mark.parametrize(("name", "part"), OF_MEGATRON)
def test_of_megatron(name, part, failures):
    if (name, part) in failures:
        pytest.fail(failures[name, part], pytrace=False)
