"""The gate rule is the model's own on live scores, at whatever experts are forced."""

from functools import partial

import torch

from foreroute.adapters.megatron.hooks import TopKRouterHook
from foreroute.core.passes import Pass, RecordOptions, Rows
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.one_rank import GATES, MegatronSubject

ROWS = 16


@on_ranks(1)
def test_gates_and_gradients_against_a_dense_oracle():
    """Router alone: weights at forced ids, and the gradient of any function of them, from autograd in float64."""
    for name in GATES:
        if "jitter" in name or "capacity" in name:
            continue
        site, hidden, ids_RK = drawn(name)
        router, config = site.module, site.module.config
        mixing_RE = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(7))
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


def drawn(gate):
    site = MegatronSubject.built(gate).routed.chunks[0].sites[0]
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, 1, site.module.config.hidden_size, generator=generator)
    return site, hidden, torch.rand(ROWS, 8, generator=generator).argsort(-1)[:, : site.module.topk]


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
