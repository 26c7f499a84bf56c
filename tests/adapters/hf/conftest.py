"""Families that an older release lacks."""

import pytest

from tests.adapters.hf.families import FAMILIES, skip_where_lacking


@pytest.fixture(autouse=True)
def in_this_release(request):
    """Of what a test is for, such as each family: an older transformers lacks some."""
    for given in request.node.callspec.params.values() if hasattr(request.node, "callspec") else ():
        if isinstance(given, str) and given in FAMILIES:
            skip_where_lacking(given)
