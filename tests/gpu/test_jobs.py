"""What real jobs turn on: each works, with own routes as without replay and foreign ones obeyed, or is refused."""

import numpy as np
import pytest
import torch

from tests.adapters.hf.model_runs import experts_log
from tests.gpu import bits
from tests.gpu.bits import Case, backward, forward, logits_of, step

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def single(device):
    """In float32."""
    return Case.of("qwen3_moe", device, torch.float32)


@pytest.fixture(scope="module")
def half(device):
    """In bfloat16."""
    return Case.of("qwen3_moe", device, torch.bfloat16)


def in_autocast(model, batch):
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16):
        done = forward(model, batch)
    return backward(model, done)


def scaled(model, batch):
    """A step in float16 of an optimizer that a scaler guards. Returns the new weights, and puts the old ones back."""
    device = batch["input_ids"].device.type
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    scaler = torch.amp.GradScaler(device, init_scale=16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast(device, torch.float16):
        logits, loss = forward(model, batch)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert any(not torch.equal(found[name], before[name]) for name in found), "the scaler skipped the step"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[name])
    return found | {"logits": logits}


@pytest.mark.parametrize(("run", "precision"), [(in_autocast, torch.bfloat16), (scaled, torch.float16)])
def test_mixed_precision(single, run, precision):
    bits.require_native_bits(single, run)
    bits.require_obeyed(single, run, precision)


def inferred(model, batch):
    with torch.inference_mode():
        return {"logits": logits_of(model, batch)}


def test_inference_mode_alone_and_before_a_training_step_with_telemetry(half):
    bits.require_native_bits(half, inferred)
    bits.require_obeyed(half, inferred)
    routed = half.routed
    with routed.replay(half.foreign):
        expected = step(routed.model, half.batch)
    with routed.replay(half.foreign, telemetry=True) as session:
        inferred(routed.model, half.batch)
        seen = step(routed.model, half.batch)
    assert torch.equal(seen["logits"], expected["logits"])
    assert session.num_forwards == 2
    assert session.agreement().differing_tokens_share > 0, "telemetry is lost"


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
def test_what_is_generated_is_replayed(half, cache):
    routed, prompts = half.routed, half.batch["input_ids"][:2, :6]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = torch.ones_like(prompts)
    with routed.record() as recording:
        sampled = routed.model.generate(prompts, **settings, **cache)
    with routed.replay(recording.rollout(sampled)) as session, torch.no_grad():
        routed.model(input_ids=sampled, use_cache=False)
    assert session.num_forwards == 1


def test_fused_attention(half):
    """Its gradients need not repeat their bits; routing is the same affair in all."""
    models = half.routed.model, half.untouched
    for model in models:
        model.set_attn_implementation("sdpa")
    require_as_plain(half, half.routed, half.routed.model)
    for model in models:
        model.set_attn_implementation("eager")


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
