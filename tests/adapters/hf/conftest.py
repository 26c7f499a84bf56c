"""One thread, as small models need, and quiet transformers."""

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(params=[None, True, False], ids=["plain", "reentrant", "non_reentrant"])
def checkpointing(request):
    """The `use_reentrant` of activation checkpointing, or None without it."""
    return request.param
