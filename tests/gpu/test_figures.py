"""Figures of a GPU see what they are to see, at the sizes of a CPU."""

import time
from contextlib import nullcontext

import pytest
import torch

from benchmarks.gpu import mismatch
from benchmarks.gpu.figures import Figures
from foreroute.adapters import hf
from foreroute.testing.models import round_by_shape

pytestmark = pytest.mark.slow


@pytest.fixture
def figures():
    return Figures(torch.device("cpu"), time.monotonic() + 300)


@pytest.fixture
def shapes_round_otherwise(monkeypatch):
    make = mismatch.layered_model
    monkeypatch.setattr(mismatch, "layered_model", lambda *args: round_by_shape(make(*args)))


@pytest.mark.usefixtures("shapes_round_otherwise")
def test_each_shape_is_compared_without_and_with_replay(figures):
    """That replay brings a trainer nearer where routes differ, the figures require themselves."""
    mismatch.run(figures)
    found = figures.found
    assert found["decode_differing_tokens_share"] > 0
    assert all(found[f"{shape}_k3_nats"] > 0 for shape in ("decode", "packed"))
    # of the same tokens, whose probabilities rounding alone moves
    assert max(found[f"{shape}_replayed_k3_nats"] for shape in ("decode", "packed")) < 0.02


@pytest.mark.usefixtures("shapes_round_otherwise")
def test_a_replay_that_does_nothing_is_seen(figures, monkeypatch):
    attach = hf.attach

    def attach_without_replay(model):
        routed = attach(model)
        routed.replay = lambda trace: nullcontext()
        return routed

    monkeypatch.setattr(hf, "attach", attach_without_replay)
    with pytest.raises(AssertionError, match="decode"):
        mismatch.run(figures)
