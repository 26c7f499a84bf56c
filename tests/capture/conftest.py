"""What a test draws from the `RNG` of its file is its own, whichever tests ran before it in the same process."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _seeded_by_name(request, monkeypatch):
    if hasattr(request.module, "RNG"):
        monkeypatch.setattr(request.module, "RNG", np.random.default_rng([*request.node.name.encode()]))
