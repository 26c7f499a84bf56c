"""One thread, as small models need, and quiet transformers."""

import pytest
import torch
import transformers

from tests.adapters.hf.families import FAMILIES, skip_where_lacking

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def in_this_release(request):
    """Of what a test is for, such as each family: an older transformers lacks some."""
    for given in request.node.callspec.params.values() if hasattr(request.node, "callspec") else ():
        if isinstance(given, str) and given in FAMILIES:
            skip_where_lacking(given)
