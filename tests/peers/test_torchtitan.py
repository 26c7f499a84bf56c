"""The core on models of torchtitan: Qwen3, DeepSeek-V3, and a stack of the blocks of gpt-oss."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from foreroute.core import AttachError, attach
from tests.peers.comparing import (
    DIM,
    TOKENS,
    VOCAB,
    Case,
    Stack,
    cells,
    ids_handed_to,
    replaced,
    require,
    require_control,
    run,
    seeded,
)

require("torchtitan")

from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.models import deepseek_v3, gpt_oss, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.nn_modules import RMSNorm

COMMON = {"dim": DIM, "moe_hidden_dim": 16, "num_experts": 8, "attn_backend": "flex", "moe_comm_backend": "standard"}


def built(config_class, layers):
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others need a GPU
    extra = {"mtp_layers": []} if "mtp_layers" in config_class.__dataclass_fields__ else {}
    config = config_class(
        vocab_size=VOCAB,
        dim=DIM,
        norm=RMSNorm.Config(normalized_shape=DIM),
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB),
        layers=layers,
        **extra,
    )
    return with_buffers(config.build())


def with_buffers(model):
    for module in model.modules():
        if hasattr(module, "_init_self_buffers"):
            module._init_self_buffers(buffer_device=torch.device("cpu"))
    return seeded(model)


def make_qwen3():
    rope = CosSinRoPE.Config(dim=8, max_seq_len=64, theta=10000.0)
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    layers = qwen3._build_qwen3_moe_layers(n_layers=3, top_k=3, rope=rope, **heads, **COMMON)
    return built(qwen3.Qwen3Model.Config, layers)


def make_deepseek_v3():
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=4,
        n_dense_layers=1,
        n_heads=4,
        q_lora_rank=0,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        mscale=0.7,
        dense_hidden_dim=64,
        num_shared_experts=1,
        router_top_k=3,
        router_score_func="sigmoid",
        router_num_expert_groups=4,
        router_num_limited_groups=2,
        router_route_scale=2.5,
        router_route_norm=True,
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000.0),
        **COMMON,
    )
    return built(deepseek_v3.DeepSeekV3Model.Config, layers)


def make_gpt_oss():
    """Blocks alone: the attention of torchtitan's gpt-oss has no path for a CPU."""
    layers = gpt_oss._build_gptoss_layers(
        dim=DIM,
        n_layers=3,
        hidden_dim=16,
        num_experts=8,
        top_k=3,
        load_balance_coeff=1e-3,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=64, max_seq_len=64, theta=10000.0),
    )
    return with_buffers(Stack("moe", [layer.moe.build() for layer in layers]).bfloat16())  # as its experts compute


def formula(router, forced_NK, native, x, bias=None):
    """Scores at given ids, normalised and scaled; the bias is for selection alone."""
    _, own, _ = native(x, bias)
    forced = forced_NK.view(own.shape)
    ids = torch.where(forced < 0, own, forced)
    logits = functional.linear(x, router.gate.weight, router.gate.bias)
    scores = logits.sigmoid() if router.score_func == "sigmoid" else logits.softmax(-1)
    weights = scores.gather(-1, ids)
    if router.route_norm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.route_scale, ids, scores


def full(model):
    FullAC(FullAC.Config()).apply(model)


def selective(model):
    SelectiveAC(SelectiveAC.Config()).apply(model)


def compiled(model, checkpoint=None):
    if checkpoint is not None:
        checkpoint(model)
    compile_config = CompileConfig(enable=True, backend="aot_eager")
    apply_compile(model, compile_config=compile_config, parallel_dims=SimpleNamespace(tp_enabled=False))


VARIANTS = {
    "full": full,
    "selective": selective,
    "compiled": compiled,
    "compiled+selective": partial(compiled, checkpoint=selective),
}
TITAN = {
    "handed": partial(ids_handed_to, class_name="RoutedExperts", argument=2),
    "forced": lambda model, ids_LNK: replaced(model, "TokenChoiceTopKRouter", ids_LNK, formula),
    "variants": VARIANTS,
    "tokens": "tokens",
}
CASES = [
    Case("Qwen3", make_qwen3, **TITAN),
    Case("DeepSeek-V3", make_deepseek_v3, **TITAN),
    Case("gpt-oss blocks", make_gpt_oss, **TITAN),
]


@pytest.mark.proven("torchtitan", '`attach(model, {"tokens": tokens})`')
@pytest.mark.parametrize(("case", "variant"), cells(CASES))
def test_routes_are_recorded_and_replayed(case, variant):
    run(case, variant)


def test_routes_of_other_tokens_are_seen(monkeypatch):
    require_control(CASES[0], monkeypatch)


def test_a_router_that_discards_its_top_k_is_refused():
    model = make_qwen3()
    for layer in model.layers.values():
        layer.moe.router._debug_force_load_balance = True
    with pytest.raises(AttachError, match="not obeyed"):
        attach(model, {"tokens": TOKENS})
