"""Gradients of routers under replay, against finite differences in float64, on one family of each kind of gate."""

import torch
from torch.overrides import TorchFunctionMode

from foreroute.adapters import hf
from foreroute.testing.models import FAMILIES, GROUPED, tiny
from tests.adapters.hf.model_runs import batch_of, loss_of, random_routes
from tests.replay.session_subject import router_paths
from tests.tiers import grid

BATCH = batch_of(9, 6, 4)


class Float64(TorchFunctionMode):
    """Turns the islands of float32 inside routers and norms into float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


@grid("family", sorted([*FAMILIES, *GROUPED]), quick=2)
def test_it_agrees_with_finite_differences(family):
    model = tiny(family).double()
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with Float64(), routed.replay(trace):
        loss_of(model, BATCH).backward()
        for path in router_paths(routed):
            weight = model.get_submodule(path).weight
            size = weight.grad.norm()
            assert size > 1e-6
            step, direction = 1e-6, weight.grad / size + 0.1 * torch.randn(weight.shape, dtype=torch.float64)
            with torch.no_grad():
                weight += step * direction
                above = loss_of(model, BATCH)
                weight -= 2 * step * direction
                below = loss_of(model, BATCH)
                weight += step * direction
            torch.testing.assert_close((above - below) / (2 * step), (weight.grad * direction).sum(), rtol=1e-5, atol=0)
