"""What real jobs turn on: each works, with own routes as without replay and foreign ones obeyed, or is refused."""

import numpy as np
import pytest
import torch

from tests.adapters.hf.model_runs import experts_log
from tests.gpu import bits
from tests.gpu.bits import Case, backward, forward, logits_of

pytestmark = pytest.mark.gpu


def in_autocast(model, batch):
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16):
        done = forward(model, batch)
    return backward(model, done)


def test_mixed_precision(device):
    single = Case.of("qwen3_moe", device, torch.float32)
    bits.require_native_bits(single, in_autocast)
    bits.require_obeyed(single, in_autocast, torch.bfloat16)


def test_fused_attention(device):
    """Its gradients need not repeat their bits; routing is the same affair in all."""
    half = Case.of("qwen3_moe", device, torch.bfloat16)
    models = half.routed.model, half.untouched
    for model in models:
        model.set_attn_implementation("sdpa")
    require_as_plain(half, half.routed, half.routed.model)


def require_as_plain(case, routed, call):
    """The model under own and foreign routes is the attached plain one, to which it is equal but for where it runs."""
    with routed.record() as recording:
        native = logits_of(call, case.batch)
    require_same_forward(case, routed, call, recording.trace(), native)
    expected = bits.replayed(case, case.foreign)
    require_same_forward(case, routed, call, case.foreign, expected)
    assert not torch.equal(native, expected), "native and foreign routes give the same logits"


def require_same_forward(case, routed, call, trace, expected):
    with experts_log(routed.model) as log, routed.replay(trace):
        logits = logits_of(call, case.batch)
    assert len(log) == trace.spec.num_layers
    for layer, (_, ids_RK) in enumerate(log):
        assert np.array_equal(ids_RK.cpu()[case.kept_R].numpy(), trace.expert_ids_NLK[:, layer])
    assert torch.equal(logits, expected)
