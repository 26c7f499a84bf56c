"""The core on models of xtuner. Mixtral's gate is a Linear and its block selects; shards run in training mode alone.

The routes are forced a second time by another `torch.topk`, or the gate's formula once more.
"""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from torch.nn import functional

from foreroute.core import attach
from tests.peers.comparing import (
    DEEPSEEK,
    SIZES,
    Case,
    another_top_k,
    cells,
    compiled,
    full,
    reentrant,
    replaced,
    require,
    rows_handed_to_each,
    run,
    seeded,
    selective,
)

require("xtuner")

from transformers import pytorch_utils

# its files do not import under the release that it pins: a name is gone
pytorch_utils.is_torch_greater_or_equal_than_1_13 = True

from xtuner.model.transformers_models.deepseek_v2 import DeepseekV2Config, DeepseekV2ForCausalLM
from xtuner.model.transformers_models.mixtral import MixtralConfig, MixtralForCausalLM

SHARDS = {"moe_implementation": "shard", "expert_in_one_shard": 4}


def make_mixtral(**how):
    sizes = {"intermediate_size": 16, "num_key_value_heads": 2, "num_local_experts": 8}
    return seeded(MixtralForCausalLM(MixtralConfig(**SIZES, **sizes, **how)))


def make_deepseek_v2(**how):
    sizes = DEEPSEEK | {"intermediate_size": 16, "moe_layer_freq": 1, "topk_method": "greedy", "aux_loss_alpha": 0.01}
    return seeded(DeepseekV2ForCausalLM(DeepseekV2Config(**sizes | how)))


def formula(gate, forced_NK, native, hidden):
    """Scores at given ids, normalised; and the auxiliary loss of these ids."""
    own, _, _ = native(hidden)
    ids = torch.where(forced_NK < 0, own, forced_NK)
    logits = functional.linear(hidden.view(len(ids), -1).float(), gate.weight.float())
    scores = logits.softmax(-1, dtype=torch.float32)
    weights = scores.gather(-1, ids)
    counts = functional.one_hot(ids.view(-1), 8).float().mean(0)
    auxiliary = (scores.mean(0) * (counts * 8)).sum() * gate.alpha
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20), auxiliary


@contextmanager
def handed_to_shards(model):
    """The two shards of a layer are each handed all ids [N K], or a map of their experts, [E / 2, K, N]."""
    seen, given = [], []

    def collect(_, args):
        given.append(args[1].detach().clone())
        if len(given) == 2:
            is_map = given[0].ndim == 3
            seen.append(torch.cat(given).any(1).T.nonzero()[:, 1].view(-1, 3) if is_map else given[0].view(-1, 3))
            given.clear()

    with ExitStack() as stack:
        for module in model.modules():
            if type(module).__name__ == "ExpertShard":
                stack.callback(module.register_forward_pre_hook(collect).remove)
        yield seen


GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "seq_aux": False}
of_mixtral = partial(rows_handed_to_each, class_name="MixtralSparseMoeBlock")
of_deepseek = partial(rows_handed_to_each, class_name="DeepseekV2MoE")


def by_formula(model, ids_LNK):
    return replaced(model, "MoEGate", ids_LNK, formula)


VARIANTS = {"full": full, "reentrant": reentrant, "selective": selective, "compiled": compiled}
CASES = [
    Case("Mixtral", make_mixtral, of_mixtral, another_top_k, VARIANTS),
    Case("Mixtral-shards", partial(make_mixtral, **SHARDS), handed_to_shards, another_top_k, VARIANTS),
    Case("DeepSeek-V2", make_deepseek_v2, of_deepseek, another_top_k, VARIANTS),
    Case("DeepSeek-V2-shards", partial(make_deepseek_v2, **SHARDS), handed_to_shards, another_top_k, VARIANTS),
    Case("DeepSeek-V2-groups", partial(make_deepseek_v2, **GROUPS), of_deepseek, by_formula, VARIANTS),
]


@pytest.mark.proven("xtuner", "`attach(model.train())`")
@pytest.mark.parametrize(("case", "variant"), cells(CASES))
def test_routes_are_recorded_and_replayed(case, variant):
    run(case, variant)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_models_are_attached_as_they_are(case):
    assert len(attach(case.build()).hooks.routers) == 3
