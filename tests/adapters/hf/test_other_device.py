"""Replay and recording where the tensors are not on the CPU: nothing is mixed, and the host does not wait."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import BatchMismatchError
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from foreroute.trace import RoutingTrace

TOKENS = np.arange(24).reshape(3, 8) % 17


def other_experts(trace):
    """Each expert moved to the next."""
    ids = (trace.expert_ids_NLK.astype(np.int64) + 1) % trace.spec.num_experts
    ends = np.cumsum(trace.lengths)[:-1]
    tokens = [trace.tokens(s) for s in range(len(trace))]
    return RoutingTrace.from_sequences(trace.spec, tokens, np.split(ids, ends))


@pytest.fixture(scope="module")
def expected():
    """The model on the CPU: its routes, and its logits on other ones."""
    routed = hf.attach(tiny("qwen3_moe"))
    ids = torch.from_numpy(TOKENS)
    with torch.no_grad():
        with routed.record() as recording:
            routed.model(input_ids=ids)
        trace = recording.trace()
        with routed.replay(other_experts(trace)):
            logits = routed.model(input_ids=ids).logits
    return trace, logits


@pytest.fixture
def there():
    """The device, a model on it, and a batch."""
    with other_device() as device:
        routed = hf.attach(tiny("qwen3_moe").to(DEVICE))
        yield device, routed, torch.from_numpy(TOKENS).to(DEVICE)


def waits(device, forward):
    """How often the host waited for the device in a forward, by the operator."""
    device.reads.clear()
    forward()
    return dict(device.reads)


def test_neither_recording_nor_replay_waits_for_the_device(there, expected):
    device, routed, ids = there

    def forward():
        return routed.model(input_ids=ids, use_cache=False).logits

    unpatched = waits(device, forward)
    with routed.record(margins=True) as recording:
        assert waits(device, forward) == unpatched
    trace = recording.trace()
    assert trace.equals(expected[0])
    for telemetry in (False, True):
        with routed.replay(other_experts(trace), telemetry=telemetry) as session, torch.no_grad():
            device.reads.clear()
            logits = forward()
            assert dict(device.reads) == unpatched
        torch.testing.assert_close(logits.values_here, expected[1], rtol=1e-4, atol=1e-4)
    assert session.agreement().routing.rows == TOKENS.size


def test_other_tokens_are_refused_when_the_session_ends(there, expected):
    _, routed, ids = there
    changed = ids.clone()
    changed[1, 2] = 5
    session = routed.replay(expected[0])
    session.__enter__()
    routed.model(input_ids=changed)
    changed.zero_()  # what was given is remembered
    with pytest.raises(BatchMismatchError, match=r"sequence 1, position 2: token 5 in the batch"):
        session.__exit__(None, None, None)
    fewer = pytest.raises(BatchMismatchError, match="the batch has 2 sequences and the trace has 3")
    with fewer, routed.replay(expected[0]):
        routed.model(input_ids=ids[:2])


def test_a_recording_keeps_tokens_that_are_overwritten(there, expected):
    _, routed, ids = there
    given = ids.clone()
    with routed.record() as recording:
        routed.model(input_ids=given, attention_mask=torch.ones_like(ids))
    given.zero_()
    assert recording.trace().equals(expected[0])


def test_gradients_reach_routers_there(there, expected):
    _, routed, ids = there
    with routed.replay(other_experts(expected[0]), missing="drop") as session:
        (routed.model(input_ids=ids).logits.sum(-1) * session.loss_mask_BT).sum().backward()
    assert all(parameter.grad.values_here.abs().sum() > 0 for parameter in routed.router_parameters())
