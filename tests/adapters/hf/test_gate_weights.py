"""Gate weights recorded and replayed: exactly, as constants, row by row. `test_every_family` has all families."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import TraceContentError
from foreroute.testing.models import FAMILIES, tiny
from foreroute.trace import ENCODINGS, RoutingTrace, load, save
from tests.traces import weighted

BATCH = torch.arange(1, 25).reshape(2, 12) % 45


def recorded(routed, tokens=BATCH, **options):
    with torch.no_grad(), routed.record(gate_weights=True, **options) as recording:
        logits = routed.model(input_ids=tokens, use_cache=False).logits
    return recording.trace(), logits


def replayed(routed, trace, tokens=BATCH):
    with routed.replay(trace, gate_weights=True):
        return routed.model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_weights_change_no_bit(family):
    routed = hf.attach(tiny(family).eval())
    trace, logits = recorded(routed)
    assert (trace.gate_weights_NLK > 0).all()
    assert torch.equal(replayed(routed, trace), logits)
    # in another order of sequences BLAS may sum a router's own logits otherwise: the weights show the bits that count
    swapped = trace.select([1, 0])
    with routed.record(gate_weights=True) as recording:
        again = replayed(routed, swapped, BATCH.flip(0))
    assert recording.trace().equals(swapped)
    torch.testing.assert_close(again, logits.flip(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_obeyed_and_constant(family):
    """The last layer's output is linear in its weights; no router is left with a gradient."""
    routed = hf.attach(tiny(family).eval())
    trace, logits = recorded(routed)
    other = weighted(trace, trace.gate_weights_NLK * 0.5)
    changed = replayed(routed, other)
    assert not torch.allclose(changed, logits, atol=1e-3)
    with routed.replay(other, gate_weights=True), routed.record(gate_weights=True) as recording:
        routed.model(input_ids=BATCH, use_cache=False)
    assert np.array_equal(recording.trace().gate_weights_NLK, other.gate_weights_NLK)
    changed.square().sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in routed.router_parameters())
    assert any(p.grad is not None and p.grad.any() for p in routed.model.parameters())
    routed.model.zero_grad(set_to_none=True)
    with routed.replay(trace):
        routed.model(input_ids=BATCH, use_cache=False).logits.square().sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in routed.router_parameters()), "live weights have one"


def test_a_lower_precision_is_reproduced():
    """Weights recorded in bfloat16 come back bit for bit in a float32 forward."""
    routed = hf.attach(tiny("qwen3_moe").eval())
    engine = hf.attach(tiny("qwen3_moe").eval().bfloat16())
    trace, _ = recorded(engine)
    with routed.replay(trace, gate_weights=True), routed.record(gate_weights=True) as recording:
        routed.model(input_ids=BATCH, use_cache=False)
    assert recording.trace().equals(trace.with_weight_version(-1))
    live = np.abs(recorded(routed)[0].gate_weights_NLK - trace.gate_weights_NLK).max()
    assert live > 1e-4, "the case must differ in precision"


def test_checkpointed_layers_recompute_with_the_same_weights(checkpointing):
    model = tiny("qwen3_moe").train()
    routed = hf.attach(model)
    trace, _ = recorded(routed)
    trace = weighted(trace, trace.gate_weights_NLK * 0.7)
    plain = gradients(routed, trace)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    for name, gradient in gradients(routed, trace).items():
        assert torch.equal(gradient, plain[name]), name


def gradients(routed, trace):
    routed.model.zero_grad(set_to_none=True)
    replayed(routed, trace).square().sum().backward()
    return {name: p.grad.clone() for name, p in routed.model.named_parameters() if p.grad is not None and p.grad.any()}


def test_slots_without_a_route_keep_their_own_weights():
    routed = hf.attach(tiny("qwen3_moe").eval())
    trace, logits = recorded(routed)
    shorter = trace.truncated(trace.lengths - 1).continued_by(
        RoutingTrace.unrouted(trace.spec, [trace.tokens(s)[-1:] for s in range(2)])
    )
    assert torch.equal(replayed(routed, shorter), logits)
    assert torch.equal(replayed(routed, weighted(shorter, shorter.gate_weights_NLK)), logits)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_file_gives_back_the_weights_of_its_picks(tmp_path, encoding):
    routed = hf.attach(tiny("qwen3_moe").eval())
    trace, logits = recorded(routed)
    read = load(save(trace, tmp_path / "trace.safetensors", encoding=encoding))
    logits = logits if read.pick_order_kept else replayed(routed, trace.without_pick_order())
    assert torch.equal(replayed(routed, read), logits)


def test_a_trace_without_them_is_refused():
    routed = hf.attach(tiny("qwen3_moe").eval())
    trace, _ = recorded(routed)
    bare = trace.without_streams("gate_weights")
    with pytest.raises(TraceContentError, match="has no gate weights to replay"):
        replayed(routed, bare)
