"""What comparisons of executed plans must see of Megatron's own: each wrong way is far from the static run.

`tests.ep.executor_properties` has what is wrong in any framework.
"""

import types
from unittest import mock

import pytest

from foreroute.adapters.megatron.planned_layer import PlannedLayer
from foreroute.adapters.megatron.separate_replicas import SeparateReplicas
from tests.adapters.megatron.executed_plans import furthest, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import OVERLAP, Cell, ExecutionCase, with_settings
from tests.adapters.megatron.test_replicas_inside import EXACT

SEEN = 1e-6
"""A million times what is let pass."""


@pytest.mark.slow
@on_ranks(4)
def test_weights_that_are_sent_before_they_are_gathered():
    told = (*OVERLAP, ("overlap_param_gather", True))
    case = ExecutionCase(Cell(ep=2, layers=2), 4, "distributed", told).in_float64()
    plain = trained(case, None)
    for path in ("direct", "host"):
        apart = furthest(trained(case, "planned", path=path), plain)
        assert max(apart.values()) <= EXACT, (path, apart)
        with mock.patch.object(PlannedLayer, "finish_gathering"):
            apart = furthest(trained(case, "planned", path=path), plain)
        assert apart["losses"] > SEEN, (path, apart)


@pytest.mark.slow
@on_ranks(2)
def test_fused_gradients_and_those_sent_through_autograd():
    """Kernels that add to main_grad make Megatron ignore what autograd brings. In float32, as they are."""
    fuse()
    settings = {"gradient_accumulation_fusion": True}
    case = ExecutionCase(with_settings(settings, ep=2, layers=2, recompute="selective"))
    plain = trained(case, None, steps=1)
    apart = furthest(trained(case, "planned", steps=1), plain)
    assert max(apart.values()) < 1e-4, apart

    with mock.patch.object(SeparateReplicas, "add_returned", through_autograd):
        apart = furthest(trained(case, "planned", steps=1), plain)
    assert apart["weights"] > 1e-2, apart


def through_autograd(self, returned, grads):
    return [returned.get(name, {}).get(row) for row in range(len(self.home["linear_fc1.weight"])) for name in self.home]


def fuse():
    """What apex's kernel does, for gradient_accumulation_fusion on the CPU."""
    from megatron.core.tensor_parallel import layers as linear

    def add(rows, grad, main_grad):
        main_grad.add_(grad.t().mm(rows))

    linear._grad_accum_fusion_available = True
    linear.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add)
