"""The core on models of nemo-automodel: Qwen3-MoE whole, and its MoE with every kind of gate in a decoder of ours.

The routes are forced a second time by automodel's own seam for replay, a handle that answers with ids.
"""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from foreroute.core import attach
from tests.peers.comparing import DIM, QWEN3, Case, Stack, cells, compiled, ids_handed_to, require, run, seeded

require("nemo-automodel")

from nemo_automodel.components.models.common.utils import BackendConfig
from nemo_automodel.components.models.qwen3_moe import model as qwen3_moe
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import Gate, MoE
from nemo_automodel.components.moe.parallelizer import apply_ac
from transformers import Qwen3MoeConfig


def backend():
    parts = dict.fromkeys(("linear", "rms_norm", "experts", "dispatcher"), "torch")
    return BackendConfig(rope_fusion=False, attn="sdpa", **parts)


def make_qwen3():
    config = Qwen3MoeConfig(**QWEN3, router_aux_loss_coef=0.0)
    config.torch_dtype = torch.float32
    with pytest.MonkeyPatch.context() as patch:  # the file names a GPU in so many words
        rotary = qwen3_moe.RotaryEmbedding
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        on_cpu = {"device": torch.device("cpu")}
        patch.setattr(qwen3_moe, "RotaryEmbedding", lambda **given: rotary(**{**given, **on_cpu}))
        return seeded(qwen3_moe.Qwen3MoeForCausalLM(config, backend=backend()))


SIZES = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_activated_experts": 3,
    "n_expert_groups": 1,
    "n_limited_groups": 1,
    "train_gate": True,
    "gate_bias_update_factor": 0.0,
    "aux_loss_coeff": 0.0,
    "score_func": "softmax",
    "route_scale": 1.0,
    "dim": DIM,
    "inter_dim": 32,
    "moe_inter_dim": 16,
    "norm_topk_prob": True,
    "dtype": torch.float32,
}


def make_stack(**gate):
    config = MoEConfig(**{**SIZES, **gate})
    stack = Stack("mlp", [MoE(config, backend()) for _ in range(3)])
    stack.config = SimpleNamespace(hidden_size=DIM, num_experts=config.n_routed_experts)  # which apply_ac asks for
    return seeded(stack)


class Handle:
    def __init__(self, forced_NK):
        self.forced_NK = forced_NK

    def apply(self, indices):
        return torch.where(self.forced_NK < 0, indices, self.forced_NK)


@contextmanager
def forced(model, ids_LNK):
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    for gate, forced_NK in zip(gates, ids_LNK, strict=True):
        gate.router_replay = Handle(forced_NK)
    try:
        yield
    finally:
        for gate in gates:
            gate.router_replay = None


def checkpointed(model, **how):
    apply_ac(model, hidden_size=DIM, num_experts=8, **how)


VARIANTS = {
    "default": partial(checkpointed, ignore_router=True),
    "full": partial(checkpointed, ignore_router=False),
    "selective": partial(checkpointed, selective=True),
    "compiled": compiled,
}
# Dynamo cannot trace the autograd function by which a gate adds its loss below a function mode, and says so
NOT_COMPILED = {name: how for name, how in VARIANTS.items() if name != "compiled"}
GATE = {
    "handed": partial(ids_handed_to, class_name="GroupedExperts", argument=3),
    "forced": forced,
    "variants": VARIANTS,
}
GROUPS = {"n_expert_groups": 4, "n_limited_groups": 2}
BIAS = {"force_e_score_correction_bias": True}
SIGMOID_BIAS = {"score_func": "sigmoid_with_bias", "route_scale": 2.5, **BIAS, **GROUPS}
AUXILIARY = {"score_func": "sigmoid", "aux_loss_coeff": 0.01, "gate_bias_update_factor": 0.001}
CASES = [
    Case("Qwen3-MoE", make_qwen3, **GATE),
    Case("late softmax", partial(make_stack, softmax_before_topk=False), **GATE),
    Case("sigmoid+bias+groups", partial(make_stack, **SIGMOID_BIAS), **GATE),
    Case("softmax+bias+groups", partial(make_stack, score_func="softmax_with_bias", **BIAS, **GROUPS), **GATE),
    Case("sigmoid+groups", partial(make_stack, score_func="sigmoid", **GROUPS), **GATE),
    Case("sqrt-softplus", partial(make_stack, score_func="sqrtsoftplus", **BIAS), **GATE),
    Case("auxiliary loss (not compiled)", partial(make_stack, **AUXILIARY), **{**GATE, "variants": NOT_COMPILED}),
]


@pytest.mark.proven("nemo-automodel", "`attach(model)`")
@pytest.mark.parametrize(("case", "variant"), cells(CASES))
def test_routes_are_recorded_and_replayed(case, variant):
    run(case, variant)


def test_qwen3_needs_no_example():
    assert len(attach(make_qwen3()).hooks.routers) == 3
