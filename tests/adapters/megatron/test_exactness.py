"""Native replay changes no bit, foreign routes are followed, and the gate rule is the model's own on live scores."""

from functools import partial

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from foreroute.adapters.megatron.hooks import TopKRouterHook
from foreroute.core.passes import Pass, RecordOptions, Rows
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.forked_ranks import on_ranks

ROWS = 16


@on_ranks(1)
def test_gates_and_gradients_against_a_dense_oracle():
    """Router alone: weights at forced ids, and the gradient of any function of them, from autograd in float64."""
    for name, settings in on.ROUTINGS.items():
        if "jitter" in name or "capacity" in name:
            continue
        _, routed = on.attached(**settings)
        site = routed.chunks[0].sites[0]
        router, config = site.module, site.module.config
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(ROWS, 1, config.hidden_size, generator=generator)
        ids_RK = torch.rand(ROWS, 8, generator=generator).argsort(-1)[:, : router.topk]
        mixing_RE = torch.randn(ROWS, 8, generator=generator)
        probs_RE, map_RE = forced(site, hidden, ids_RK)
        (probs_RE * mixing_RE).sum().backward()
        weight = router.weight.detach().double().requires_grad_()
        gates_RK = oracle(hidden[:, 0].double() @ weight.T, ids_RK, config)
        (gates_RK * mixing_RE.double().gather(1, ids_RK)).sum().backward()
        wanted_RE = torch.zeros(ROWS, 8, dtype=torch.float64).scatter(1, ids_RK, gates_RK.detach())
        assert torch.equal(map_RE, wanted_RE != 0), name
        assert torch.allclose(probs_RE.double(), wanted_RE, atol=1e-5), f"{name}: gates differ"
        assert torch.allclose(router.weight.grad.double(), weight.grad, atol=1e-4), f"{name}: gradients differ"
        live_RK = router(hidden)[1]
        outside = map_RE & ~live_RK
        assert outside.any(), "no pick outside the live ones; the check shows nothing"
        assert (probs_RE[outside] > 0).all(), f"{name}: an expert outside the live picks has no weight"


@on_ranks(1)
def test_the_oracle_tells_a_wrong_rule_apart():
    """The control: gates gathered from scores that were zeroed outside the live picks, or of another rule."""
    _, routed = on.attached(moe_router_score_function="sigmoid")
    site = routed.chunks[0].sites[0]
    hidden = torch.randn(ROWS, 1, 32, generator=torch.Generator().manual_seed(5))
    ids_RK = torch.rand(ROWS, 8, generator=torch.Generator().manual_seed(6)).argsort(-1)[:, :2]
    probs_RE, _ = forced(site, hidden, ids_RK)
    logits_RE = hidden[:, 0].double() @ site.module.weight.detach().double().T
    zeroed_RK = site.module(hidden)[0].detach().double().gather(1, ids_RK)
    softmax_RK = logits_RE.gather(1, ids_RK).softmax(-1)
    for wrong_RK in (zeroed_RK, softmax_RK):
        assert not torch.allclose(probs_RE.double().gather(1, ids_RK), wrong_RK, atol=1e-5)


@on_ranks(1)
def test_megatrons_own_replay_is_left_alone():
    built, routed = on.attached()
    ids = on.tokens()
    before = [dict(vars(own)) for own in RouterReplay.global_router_replay_instances]
    assert before, "the model was built without router replay; the check shows nothing"
    instances = [site.module.router_replay for site in routed.chunks[0].sites]
    with routed.replay(on.recorded(routed, ids)):
        on.step(built, ids)
    assert [dict(vars(own)) for own in RouterReplay.global_router_replay_instances] == before
    assert all(site.module.router_replay is own for site, own in zip(routed.chunks[0].sites, instances, strict=True))


def forced(site, hidden, ids_RK):
    hook = TopKRouterHook(site)
    shape = [hook], len(ids_RK), torch.int16, ids_RK.device
    [now] = Pass(*shape, Rows(ids_RK[None].short()), RecordOptions()).parts()
    hook.now = now
    with hook.installed(partial(hook.select, now)):
        return site.module(hidden)


def oracle(logits_RE, ids_RK, config):
    """Gate weights [R, K] as the configuration's names say, written down a second time."""
    if config.moe_router_score_function == "sigmoid":
        scores_RK = logits_RE.sigmoid().gather(1, ids_RK)
        gates_RK = scores_RK / scores_RK.sum(1, keepdim=True) if config.moe_router_topk > 1 else scores_RK
    elif config.moe_router_pre_softmax:
        gates_RK = logits_RE.softmax(1).gather(1, ids_RK)
    else:
        gates_RK = logits_RE.gather(1, ids_RK).softmax(1)
    return gates_RK * (config.moe_router_topk_scaling_factor or 1.0)
