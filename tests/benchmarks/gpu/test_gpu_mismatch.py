"""The mismatch part of the GPU proof, at the sizes of a CPU: it sees mismatch, and a replay that does nothing."""

import time
from contextlib import nullcontext

import pytest
import torch

from benchmarks.gpu import mismatch
from benchmarks.gpu.part import Part
from foreroute.adapters import hf
from foreroute.testing.models import round_by_shape

SHAPES = ("decode", "other_batches", "packed", "alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mismatch")


@pytest.fixture(autouse=True)
def shapes_round_otherwise(monkeypatch):
    make = mismatch.layered_model
    monkeypatch.setattr(mismatch, "layered_model", lambda *args: round_by_shape(make(*args)))


def run(folder):
    part = Part("mismatch", torch.device("cpu"), False, time.monotonic() + 300, folder / "mismatch.json")
    mismatch.run(part)
    return part


def test_each_shape_is_compared_without_and_with_replay(folder):
    part = run(folder)
    assert part.outcome == "passed"
    for shape in SHAPES:
        assert part.checks[f"{shape}: routes are obeyed"] == "passed"
        for measured in ("differing_routers_share", "differing_tokens_share", "f2_share", "replayed_f2_share"):
            assert 0 <= part.figures[f"{shape}_{measured}"] <= 1
        assert part.figures[f"{shape}_k3_nats"] > 0
        assert part.figures[f"{shape}_replayed_k3_nats"] >= 0
    # a decode rounds otherwise than a trainer, and its routes bring the trainer nearer
    assert part.figures["decode_differing_tokens_share"] > 0
    assert part.figures["decode_replayed_k3_nats"] < part.figures["decode_k3_nats"]
    # the same forward again is the same
    assert part.figures["repeat_same_bits"] is True
    assert part.figures["repeat_k3_nats"] == part.figures["repeat_differing_routers_share"] == 0


def test_a_replay_that_does_nothing_is_reported(folder, monkeypatch):
    attach = hf.attach

    def attach_without_replay(model):
        routed = attach(model)
        routed.replay = lambda trace: nullcontext()
        return routed

    monkeypatch.setattr(hf, "attach", attach_without_replay)
    checks = run(folder).checks
    assert "are not those that it was given" in checks["decode: routes are obeyed"]
    assert "expected less" in checks["decode: replay brings probabilities nearer"]
