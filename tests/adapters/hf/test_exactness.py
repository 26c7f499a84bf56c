"""Replay is exact: the tests of Rollout Routing Replay, on one family of each kind of gate.

The oracles are the same model without foreroute, a log of what the experts were given, gate formulas in float64, and
finite differences. The negative controls at the end must be seen to fail.
"""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import foreroute as fr
from foreroute.adapters import hf
from foreroute.mismatch import token_mismatch
from foreroute.testing.models import FAMILIES, GROUPED, tiny
from tests.adapters.hf.model_runs import (
    batch_of,
    enable_checkpointing,
    experts_log,
    gradients,
    log_probs,
    loss_of,
    random_routes,
    sequences_of,
)


def gate_weights(family, router, logits_RE, ids_RK, config):
    """[R, K] in the dtype of the logits."""
    if family in {"qwen3_moe", "olmoe", "mixtral"}:
        picked = logits_RE.exp().gather(-1, ids_RK)
        renormalised = family == "mixtral" or config.norm_topk_prob
        total = picked.sum(-1, keepdim=True) if renormalised else logits_RE.exp().sum(-1, keepdim=True)
        return picked / total
    if family == "gpt_oss":
        picked = logits_RE.gather(-1, ids_RK).exp()
        return picked / picked.sum(-1, keepdim=True)
    if family == "deepseek_v3":  # the bias steers selection and takes no part in the weight
        picked = (1 / (1 + torch.exp(-logits_RE))).gather(-1, ids_RK)
        return config.routed_scaling_factor * picked / picked.sum(-1, keepdim=True)
    if family == "deepseek_v2":  # the group limit steers selection and takes no part in the weight
        probs = logits_RE.exp() / logits_RE.exp().sum(-1, keepdim=True)
        return config.routed_scaling_factor * probs.gather(-1, ids_RK)
    raise KeyError(family)


ALL = sorted([*FAMILIES, *GROUPED])
BATCH = batch_of(9, 6, 4)


@pytest.mark.parametrize("family", ALL)
def test_native_replay_is_bit_equal_to_the_untouched_model(family, checkpointing):
    untouched, model = tiny(family), tiny(family)
    for each in (untouched, model):
        enable_checkpointing(each, checkpointing)
    expected = loss_of(untouched, BATCH)
    expected.backward()

    routed = hf.attach(model)
    with routed.record() as recording, torch.no_grad():
        model(**BATCH)
    with routed.replay(recording.trace()):
        loss = loss_of(model, BATCH)
        loss.backward()

    assert torch.equal(loss, expected)
    mine, theirs = gradients(model), gradients(untouched)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_every_expert_backend_is_bit_equal(family, experts):
    untouched, model = tiny(family, experts=experts), tiny(family, experts=experts)
    expected = loss_of(untouched, BATCH)
    expected.backward()
    routed = hf.attach(model)
    with routed.record() as recording, torch.no_grad():
        model(**BATCH)
    with routed.replay(recording.trace()):
        loss = loss_of(model, BATCH)
        loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradients(model)[name], gradient) for name, gradient in gradients(untouched).items())


@pytest.mark.parametrize("family", ALL)
def test_experts_get_exactly_the_replayed_ids_also_in_recomputation(family, checkpointing):
    model = tiny(family)
    enable_checkpointing(model, checkpointing)
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with experts_log(model) as log:
        with routed.replay(trace):
            loss = loss_of(model, BATCH)
        loss.backward()  # outside: recomputation must bring its own routes

    layers = {path: layer for layer, path in enumerate(sorted({path for path, _ in log}))}
    kept = BATCH["attention_mask"].bool().reshape(-1)
    for path, ids in log:
        assert np.array_equal(ids[kept].numpy(), trace.expert_ids_NLK[:, layers[path]])
    forwards = 1 if checkpointing is None else 2
    assert len(log) == forwards * routed.spec.num_layers


@pytest.mark.parametrize("family", ALL)
def test_gate_weights_follow_the_formula_of_the_family_at_the_replayed_ids(family):
    model = tiny(family)
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    kept = BATCH["attention_mask"].bool().reshape(-1)
    seen = []
    routers = [model.get_submodule(path) for path in routed.router_paths]
    handles = [r.register_forward_hook(lambda r, a, out: seen.append((r, out))) for r in routers]
    with routed.replay(trace), torch.no_grad():
        model(**BATCH)
    for handle in handles:
        handle.remove()
    for layer, (router, (logits, weights, ids)) in enumerate(seen):
        assert np.array_equal(ids[kept].numpy(), trace.expert_ids_NLK[:, layer])
        expected = gate_weights(family, router, logits.double(), ids, model.config)
        torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=1e-7)
        assert (weights[kept] > 0).all(), "an expert outside the live top-k lost its gate"


class Float64(TorchFunctionMode):
    """Turns the islands of float32 inside routers and norms into float64, for finite differences."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


@pytest.mark.parametrize("family", ALL)
def test_router_gradient_agrees_with_finite_differences(family):
    model = tiny(family).double()
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with Float64(), routed.replay(trace):
        loss_of(model, BATCH).backward()
        for path in routed.router_paths:
            weight = model.get_submodule(path).weight
            size = weight.grad.norm()
            assert size > 1e-6
            direction = weight.grad / size + 0.1 * torch.randn(weight.shape, dtype=torch.float64)
            with torch.no_grad():
                step = 1e-6
                weight += step * direction
                above = loss_of(model, BATCH)
                weight -= 2 * step * direction
                below = loss_of(model, BATCH)
                weight += step * direction
            torch.testing.assert_close((above - below) / (2 * step), (weight.grad * direction).sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_gradient_bit_under_foreign_routes(family, use_reentrant):
    plain, checkpointed = tiny(family), tiny(family)
    enable_checkpointing(checkpointed, use_reentrant)
    for model in (plain, checkpointed):
        routed = hf.attach(model)
        with routed.replay(random_routes(routed.spec, BATCH)):
            loss_of(model, BATCH).backward()
    assert all(torch.equal(gradients(checkpointed)[name], grad) for name, grad in gradients(plain).items())


def router_logit_gradients(model, routed, trace):
    """[(gradient of the router's logits, mask of replayed experts)] per layer, without padding."""
    logits = []
    handles = [
        model.get_submodule(path).register_forward_hook(lambda r, a, out: _retain(out[0], logits))
        for path in routed.router_paths
    ]
    with routed.replay(trace):
        loss_of(model, BATCH).backward()
    for handle in handles:
        handle.remove()
    kept = BATCH["attention_mask"].bool().reshape(-1)
    replayed = torch.zeros(routed.spec.num_layers, trace.num_rows, routed.spec.num_experts, dtype=torch.bool)
    ids = torch.from_numpy(trace.expert_ids_NLK.astype(np.int64)).transpose(0, 1)
    replayed.scatter_(-1, ids, True)
    return [(logit.grad[kept], mask) for logit, mask in zip(logits, replayed, strict=True)]


def _retain(logits, into):
    logits.retain_grad()
    into.append(logits)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "qwen3_moe", "mixtral", "olmoe"])
def test_no_router_gradient_outside_the_replayed_set(family):
    model = tiny(family)
    if family == "olmoe":  # without renormalisation its gate is a softmax over all experts, whose gradient reaches all
        for path, module in model.named_modules():
            if path.endswith("gate"):
                module.norm_topk_prob = True
    routed = hf.attach(model)
    pairs = router_logit_gradients(model, routed, random_routes(routed.spec, BATCH))
    exact = family in {"gpt_oss", "deepseek_v3"}
    for gradient, replayed in pairs:
        inside, outside = gradient[replayed].abs(), gradient[~replayed].abs()
        assert inside.mean() > 0
        assert outside.max() <= (0 if exact else 1e-5 * inside.mean())


def test_olmoe_without_renormalisation_reaches_every_logit():
    model = tiny("olmoe")
    routed = hf.attach(model)
    for gradient, replayed in router_logit_gradients(model, routed, random_routes(routed.spec, BATCH)):
        assert gradient[~replayed].abs().mean() > 1e-3 * gradient[replayed].abs().mean()


@pytest.mark.parametrize("family", ALL)
def test_pick_order_does_not_change_the_outcome(family):
    model = tiny(family)
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    tokens = [trace.tokens(s) for s in range(len(trace))]
    ids = np.split(trace.expert_ids_NLK[..., ::-1], trace.offsets[1:-1])
    reversed_order = fr.RoutingTrace.from_sequences(routed.spec, tokens, ids)
    with torch.no_grad():
        with routed.replay(trace):
            one = log_probs(model, BATCH)
        with routed.replay(reversed_order):
            other = log_probs(model, BATCH)
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_misplaced_routes_are_seen(family):
    """A mask shifted by one token, shuffled between tokens, or random raises k3; the right one leaves it at zero."""
    model = tiny(family)
    routed = hf.attach(model)
    with routed.record() as recording, torch.no_grad():
        native = log_probs(model, BATCH)
    trace = recording.trace()
    rng = np.random.default_rng(0)
    tokens = sequences_of(BATCH)
    routes = np.split(trace.expert_ids_NLK, trace.offsets[1:-1])
    wrong = {
        "shifted": [np.roll(r, 1, axis=0) for r in routes],
        "shuffled": [rng.permutation(r) for r in routes],
        "random": np.split(random_routes(routed.spec, BATCH).expert_ids_NLK, trace.offsets[1:-1]),
    }

    def k3_under(replayed):
        with routed.replay(replayed), torch.no_grad():
            return token_mismatch(log_probs(model, BATCH).numpy(), native.numpy()).k3

    assert k3_under(trace) == 0
    for name, ids in wrong.items():
        k3 = k3_under(fr.RoutingTrace.from_sequences(routed.spec, tokens, ids))
        assert k3 > 1e-3, f"{name} routes went unnoticed: k3 {k3}"
