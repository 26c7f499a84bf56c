"""Every property of sessions, of models of every framework."""

import pytest

from tests.adapters.hf.session_subject import HuggingFaceSubject
from tests.adapters.megatron.forked_ranks import run
from tests.replay.session_properties import PROPERTIES


@pytest.mark.parametrize("name", PROPERTIES)
def test_of_transformers(name):
    PROPERTIES[name](HuggingFaceSubject)


@pytest.fixture(scope="module")
def failures(request):
    """By name, the traceback of each property that does not hold of Megatron-Core; all are asked in one process."""
    asked = [item for item in request.session.items if item.path == request.path and "failures" in item.fixturenames]
    names = [item.callspec.params["name"] for item in asked]
    [failed] = run("session_subject.failures", names, timeout=400)
    return failed


@pytest.mark.parametrize("name", PROPERTIES)
def test_of_megatron(name, failures):
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
