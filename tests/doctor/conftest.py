"""One thread, as small models need, and quiet transformers."""

import pytest
import torch
import transformers

from foreroute.doctor import examine

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture
def unwired(monkeypatch):
    """The wiring is not looked at, which is most of the time of an examination."""
    monkeypatch.setattr(examine, "QUICK", ())
