"""Replay is exact: what neither `test_every_family` nor the kit asks, on one family of each kind of gate.

The oracle of gradients is finite differences in float64.
"""

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

import foreroute as fr
from foreroute.adapters import hf
from foreroute.testing.models import FAMILIES, GROUPED, tiny
from tests.adapters.hf.model_runs import batch_of, log_probs, loss_of, random_routes
from tests.tiers import grid

ALL = sorted([*FAMILIES, *GROUPED])
BATCH = batch_of(9, 6, 4)


class Float64(TorchFunctionMode):
    """Turns the islands of float32 inside routers and norms into float64, for finite differences."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


@grid("family", ALL, quick=2)
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


@grid("family", ALL, quick=3)
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
