"""Every property of sessions, of models of every framework.

A property that holds for every kind of gate or every way of recomputing activations is asked of the usual one and of a
few others at once, of which each property has its own; by night of all. `make test` asks all of transformers, and CI of
Megatron-Core too.
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


@pytest.mark.parametrize(("name", "part"), IN_PARTS)
def test_of_transformers(name, part):
    PROPERTIES[name](part(HuggingFaceSubject, name))


@pytest.fixture(scope="module")
def failures(request):
    """By name and part, the traceback of each property that does not hold of Megatron-Core; asked in one process."""
    asked = [item for item in request.session.items if item.path == request.path and "failures" in item.fixturenames]
    [failed] = run("one_rank.failures", [tuple(item.callspec.params.values()) for item in asked], timeout=400)
    return failed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), IN_PARTS)
def test_of_megatron(name, part, failures):
    if (name, part) in failures:
        pytest.fail(failures[name, part], pytrace=False)
