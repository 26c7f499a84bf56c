"""The core on models of veomni, experts in eager mode: its kernels need a GPU.

The routes are forced a second time by its own seam for replay, where a family has it, or its formula once more.
"""

from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import cycle

import pytest
import torch
from torch.nn import functional

from foreroute.core import AttachError, ReplayError, attach
from tests.peers.comparing import (
    DEEPSEEK,
    QWEN,
    QWEN3,
    TOKENS,
    Case,
    cells,
    compiled,
    full,
    ids_handed_to,
    reentrant,
    replaced,
    require,
    run,
    seeded,
    selective,
)

require("veomni")

import transformers
from veomni.utils.moe_router_replay import set_active_replay

NO_ENDS = {"bos_token_id": None, "eos_token_id": None}


def made(family, class_name, config):
    module = import_module(f"veomni.models.transformers.{family}.generated.patched_modeling_{family}_gpu")
    module.veomni_moe_experts_forward.bind("eager")
    return seeded(getattr(module, class_name)(config))


def make_qwen3():
    return made("qwen3_moe", "Qwen3MoeForCausalLM", transformers.Qwen3MoeConfig(**QWEN3, **NO_ENDS))


def make_qwen3_5():
    sizes = {"num_experts": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    full = ["full_attention"] * 3  # linear attention has no path for a CPU
    config = transformers.Qwen3_5MoeTextConfig(**QWEN, **NO_ENDS, **sizes, layer_types=full)
    return made("qwen3_5_moe", "Qwen3_5MoeForCausalLM", config)


def make_deepseek_v3():
    sizes = {"intermediate_size": 32, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "head_dim": 8}
    config = transformers.DeepseekV3Config(**DEEPSEEK, **NO_ENDS, **sizes, tie_word_embeddings=False)
    return made("deepseek_v3", "DeepseekV3ForCausalLM", config)


def make_gpt_oss():
    config = transformers.GptOssConfig(**QWEN, **NO_ENDS, num_local_experts=8, sliding_window=4)
    return made("gpt_oss", "GptOssForCausalLM", config)


class Manager:
    """Answers the routers of every forward with ids, one after the other."""

    def __init__(self, ids_LNK):
        self.answers = cycle(ids_LNK)

    def on_router_forward(self, router, scores, ids):
        forced = next(self.answers)
        return torch.where(forced < 0, ids, forced) if forced.shape == ids.shape else ids


@contextmanager
def by_its_manager(_, ids_LNK):
    set_active_replay(Manager(ids_LNK))
    try:
        yield
    finally:
        set_active_replay(None)


def of_deepseek(block, forced_NK, native, logits):
    own, _ = native(logits)
    ids = torch.where(forced_NK < 0, own, forced_NK)
    weights = logits.sigmoid().gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * block.routed_scaling_factor


def of_gpt_oss(router, forced_NK, native, hidden):
    logits, _, own = native(hidden)
    ids = torch.where(forced_NK < 0, own, forced_NK)
    return logits, functional.softmax(logits.gather(1, ids), dim=1, dtype=logits.dtype), ids


def offsets(tokens):
    return {"cu_seq_lens_q": torch.arange(len(tokens) + 1, dtype=torch.int32) * tokens.shape[1]}


OF_DEEPSEEK = {"class_name": "DeepseekV3MoE", "formula": of_deepseek, "method": "route_tokens_to_experts"}
OF_GPT_OSS = {"class_name": "GptOssTopKRouter", "formula": of_gpt_oss}


def by_formula(**how):
    return lambda model, ids_LNK: replaced(model, ids_LNK=ids_LNK, **how)


def handed(class_name):
    return partial(ids_handed_to, class_name=class_name, argument=1)


VARIANTS = {"full": full, "reentrant": reentrant, "selective": selective, "compiled": compiled}
CASES = [
    Case("Qwen3-MoE", make_qwen3, handed("Qwen3MoeExperts"), by_its_manager, VARIANTS),
    Case("Qwen3.5-MoE", make_qwen3_5, handed("Qwen3_5MoeExperts"), by_its_manager, VARIANTS, more=offsets),
    Case("DeepSeek-V3", make_deepseek_v3, handed("DeepseekV3NaiveMoe"), by_formula(**OF_DEEPSEEK), VARIANTS),
    Case("gpt-oss", make_gpt_oss, handed("GptOssExperts"), by_formula(**OF_GPT_OSS), VARIANTS),
]


@pytest.mark.proven(
    "veomni", '`attach(model)`; Qwen3.5: `attach(model, {"input_ids": tokens, "cu_seq_lens_q": offsets})`'
)
@pytest.mark.parametrize(("case", "variant"), cells(CASES))
def test_routes_are_recorded_and_replayed(case, variant):
    run(case, variant)


def test_as_they_are_models_are_attached():
    for make in (make_qwen3, make_deepseek_v3, make_gpt_oss):
        assert len(attach(make()).hooks.routers) == 3


def test_its_own_replay_behind_a_router_is_told():
    """It swaps ids between routers and experts: what a router picked is not what runs."""
    model = make_qwen3_5()
    arguments = {"input_ids": TOKENS, **offsets(TOKENS)}
    routed = attach(model, arguments)
    with torch.no_grad(), routed.record() as recording:
        model(**arguments)
    [own] = recording.ids()
    others = ((own.long() + 1) % 8).permute(2, 0, 1, 3).flatten(1, 2)
    for session in (routed.record, lambda: routed.replay(own)):
        said = pytest.raises(ReplayError, match="handed other")
        with torch.no_grad(), by_its_manager(model, others), said, session():
            model(**arguments)
    with torch.no_grad(), by_its_manager(model, others), pytest.raises(AttachError, match="not those"):
        attach(model, arguments)
