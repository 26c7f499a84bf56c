"""The core on models of nemo-automodel: Qwen3-MoE whole, and its MoE with every kind of gate in a decoder of ours.

The routes are forced a second time by automodel's own seam for replay, a handle that answers with ids.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from foreroute.core import attach
from tests.peers.comparing import (
    DIM,
    VOCAB,
    Kind,
    cells,
    ids_handed_to,
    require,
    run,
    seeded,
)

require("nemo-automodel")

from nemo_automodel.components.models.common.utils import BackendConfig
from nemo_automodel.components.models.qwen3_moe import model as qwen3_moe
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.layers import Gate, MoE
from nemo_automodel.components.moe.parallelizer import apply_ac
from transformers import Qwen3MoeConfig


def backend(**changes):
    names = ("attn", "linear", "rms_norm", "experts", "dispatcher")
    values = ("sdpa", "torch", "torch", "torch", "torch")
    return BackendConfig(rope_fusion=False, **dict(zip(names, values, strict=True)), **changes)


def make_qwen3():
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        router_aux_loss_coef=0.0,
    )
    config.torch_dtype = torch.float32
    with pytest.MonkeyPatch.context() as patch:  # the file names a GPU in so many words
        rotary = qwen3_moe.RotaryEmbedding
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        on_cpu = {"device": torch.device("cpu")}
        patch.setattr(qwen3_moe, "RotaryEmbedding", lambda **given: rotary(**{**given, **on_cpu}))
        return seeded(qwen3_moe.Qwen3MoeForCausalLM(config, backend=backend()))


class Stack(nn.Module):
    def __init__(self, config, backend):
        super().__init__()
        self.config = type("Config", (), {"hidden_size": DIM, "num_experts": config.n_routed_experts})()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(number): Layer(config, backend) for number in range(3)})
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids):
        h = self.embed_tokens(input_ids)
        for layer in self.layers.values():
            h = layer(h)
        return self.lm_head(h)


class Layer(nn.Module):
    def __init__(self, config, backend):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(DIM), MoE(config, backend)

    def forward(self, h):
        h = h + h.cumsum(1) / (1 + torch.arange(h.shape[1]))[:, None]
        return h + self.mlp(self.norm(h))


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


def make_stack(changes=None, **gate):
    return seeded(Stack(MoEConfig(**{**SIZES, **gate}), backend(**(changes or {}))))


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


def compiled(model):
    for layer in getattr(model, "model", model).layers.values():
        layer.compile(backend="aot_eager")


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
KINDS = [
    Kind("Qwen3-MoE", make_qwen3, **GATE),
    Kind("late softmax", partial(make_stack, softmax_before_topk=False), **GATE),
    Kind("sigmoid+bias+groups", partial(make_stack, **SIGMOID_BIAS), **GATE),
    Kind("softmax+bias+groups", partial(make_stack, score_func="softmax_with_bias", **BIAS, **GROUPS), **GATE),
    Kind("sigmoid+groups", partial(make_stack, score_func="sigmoid", **GROUPS), **GATE),
    Kind("sqrt-softplus", partial(make_stack, score_func="sqrtsoftplus", **BIAS), **GATE),
    Kind(
        "auxiliary loss (not compiled)",
        partial(make_stack, **AUXILIARY),
        **{**GATE, "variants": NOT_COMPILED},
    ),
]


@pytest.mark.proven("nemo-automodel", "`attach(model)`")
@pytest.mark.parametrize(("kind", "variant"), cells(KINDS))
def test_routes_are_recorded_and_replayed(kind, variant):
    run(kind, variant)


def test_qwen3_needs_no_example():
    assert len(attach(make_qwen3()).hooks.routers) == 3
