"""Every property of sessions, of models of every framework.

A property that holds for every kind of gate or every way of recomputing activations is asked of the usual one and of a
few others at once, of which each property has its own; by night of all. `make test` asks all of transformers, and the
main ones of Megatron-Core.
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
MAIN = {
    "the_model_is_as_before_after_sessions_and_errors",
    "a_recomputation_gives_experts_what_the_forward_gave_them",
    "micro_batches_in_flight_keep_their_own_routes",
    "padding_is_spread_over_experts_and_real_rows_go_where_they_went",
    "recorded_margins_are_the_gap_to_the_best_expert_that_could_have_been_picked",
    "own_routes_change_no_bit_and_others_are_followed",
    "rows_without_a_route_are_routed_by_the_model_and_others_as_given",
}
"""What sessions touch, repeat, keep apart, follow and leave to the model.

Two more, which a release of Megatron-Core can break: padding that is spread over experts, and recorded margins.
"""
OF_MEGATRON = [
    each if each.marks or each.values[0] in MAIN else pytest.param(*each.values, id=each.id, marks=pytest.mark.slow)
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
