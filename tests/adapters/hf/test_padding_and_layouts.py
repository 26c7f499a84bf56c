"""Layouts that say where the sequences of a batch are, and batches of padding alone."""

import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import BatchMismatchError, LayoutError
from foreroute.layout import pack, pad
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, gradients, loss_of, random_routes
from tests.adapters.hf.test_packed import ALONE, packed, sequence_order

LENGTHS = (9, 6, 4)


def step(model, routed, trace, batch, **how):
    """Loss and gradients."""
    model.zero_grad()
    with routed.replay(trace, **how):
        loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_layout_of_the_batch_changes_nothing(side):
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    batch = batch_of(*LENGTHS, side=side)
    trace = random_routes(routed.spec, batch)
    layout = pad(trace.lengths, side=side, order="bshd")
    seen, expected = (step(model, routed, trace, batch, **how) for how in ({"layout": layout}, {}))
    assert torch.equal(seen[0], expected[0])
    assert all(torch.equal(seen[1][name], gradient) for name, gradient in expected[1].items())


def test_the_layout_of_a_packed_batch_is_taken():
    rows = [[0, 1, 2, 3, 4, 5]]
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    trace = random_routes(routed.spec, ALONE).select(sequence_order(rows))
    with routed.replay(trace, pack(trace.lengths)), torch.no_grad():
        seen = model(**packed(rows), use_cache=False).logits
    with routed.replay(trace), torch.no_grad():
        assert torch.equal(model(**packed(rows), use_cache=False).logits, seen)


@pytest.mark.parametrize(
    ("layout", "kind", "message"),
    [
        (lambda lengths: pad(lengths, side="right", order="sbhd"), LayoutError, "sequence first"),
        (lambda lengths: pack(lengths, align=2).split_context(1, 0).split_sequence(2, 0), LayoutError, "split"),
        (lambda lengths: "right", LayoutError, "layout is a str"),
        (lambda lengths: pad(lengths[:2], side="right", order="bshd"), BatchMismatchError, "15 packed rows"),
    ],
)
def test_a_layout_that_is_none_of_a_batch_is_refused_at_once(layout, kind, message):
    routed = hf.attach(tiny("qwen3_moe"))
    trace = random_routes(routed.spec, batch_of(*LENGTHS))
    with pytest.raises(kind, match=message):
        routed.replay(trace, layout(trace.lengths)).__enter__()


@pytest.mark.parametrize("padding", ["native", "spread"])
def test_a_batch_of_padding_alone_is_replayed_as_it_was_recorded(padding):
    """As that of a rank that got no sequence."""
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    batch = {name: torch.zeros((2, 5), dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    with torch.no_grad(), routed.record(gate_weights=True) as recording:
        native = model(**batch, use_cache=False).logits
    trace = recording.trace()
    assert (len(trace), trace.num_rows) == (2, 0)
    for how in ({}, {"gate_weights": True}, {"missing": "drop", "telemetry": True}):
        with torch.no_grad(), routed.replay(trace, padding=padding, **how) as session:
            replayed = model(**batch, use_cache=False).logits
        assert torch.equal(replayed, native) == (padding == "native")
    assert not session.loss_mask_BT.any()
