"""The cost model by hand, presets against published sizes, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.costs.model import BACKWARD, CostModel
from foreroute.costs.presets import HARDWARE, MODELS, model_preset
from foreroute.plan.hosts import CellPlan, Hosts

COSTS = CostModel(model=MODELS["qwen3-30b-a3b"], hardware=HARDWARE["h100"])


def test_an_expert_by_hand():
    product, weights, rows = 2 * 3 * 2048 * 768 / 600e12, 3 * 2048 * 768 * 2 / 2.7e12, (8 * 2048 + 6 * 768) / 2.7e12
    assert COSTS.expert_seconds(np.array([0, 1, 128, 129, 4096])) == pytest.approx(
        [
            0,
            128 * product + weights + rows,
            128 * (product + rows) + weights,
            256 * product + weights + 129 * rows,
            4096 * (product + rows) + weights,
        ]
    )
    assert COSTS.expert_seconds(np.array([128]), BACKWARD) == pytest.approx(
        [128 * (2 * product + 1.6 * rows) + 4 * weights]
    )


def test_a_rank_publishes_what_it_sends_within_its_node():
    home_LE = np.array([[0, 0, 1, 1, 2, 2, 3, 3]] * 2, np.int16)
    # (expert, rank): twice the same, to another node, at home, and in the second layer one of rank 1 and two of rank 3
    sent = [[(0, 1), (4, 0)], [(2, 0), (7, 2), (6, 2)], [(0, 1), (1, 0)], []]
    cells = []
    for its in sent:
        expert_R, rank_R = np.array(its, np.int16).reshape(-1, 2).T
        none_RG = np.zeros((len(its), 4), np.int32)
        cells.append(CellPlan(home_LE[0], expert_R, rank_R, 0 * rank_R, expert_R >= 0, none_RG))
    hosts = Hosts.of_cells(home_LE, cells)
    assert np.argwhere(hosts.sent_LEW(2)).tolist() == [[0, 0, 1], [1, 2, 0], [1, 6, 0], [1, 7, 0]]
    topology = replace(HARDWARE["h100"].topology(4, 2), ranks_per_node=2)
    expert_s = 3 * 2048 * 768 * 2 / topology.links.host_bytes_per_s
    assert replace(COSTS, paths="host").publish_seconds(hosts, topology) == pytest.approx(2 * expert_s)
    assert COSTS.publish_seconds(hosts, topology) == 0


def test_attention_and_head_by_hand():
    projections = 2 * 2048 * 128 * (32 + 4)  # queries and output, keys and values
    by_hand = 2 * projections * 1000 / 600e12 + 2 * 32 * 128 * 3e6 / 400e12
    assert COSTS.attention_seconds(np.array([1000]), np.array([3e6])) == pytest.approx([by_hand])
    backward = 2 * 2 * projections * 1000 / 600e12 + 3 * 2 * 32 * 128 * 3e6 / 400e12
    assert COSTS.attention_seconds(np.array([1000]), np.array([3e6]), BACKWARD) == pytest.approx([backward])
    usual = replace(COSTS, sequence_tokens=3000)
    assert usual.attention_seconds(np.array([1000])) == pytest.approx([by_hand])
    head = 2 * 2048 * 151_936 / 600e12 + 10 * 151_936 / 2.7e12
    assert COSTS.head_seconds(np.array([7])) == pytest.approx([7 * head])


@pytest.mark.parametrize(
    ("name", "billions", "share"),
    [
        ("qwen3-30b-a3b", 30.5, 0.01),
        ("qwen3-235b-a22b", 235, 0.01),
        ("glm-4.5-air", 106, 0.03),
        ("glm-4.5", 355, 0.03),
        ("qwen3-next-80b-a3b", 80, 0.02),
        ("deepseek-v3", 671, 0.03),  # three dense layers are left out
        ("kimi-k2", 1026, 0.03),
    ],
)
def test_models_have_as_many_parameters_as_published(name, billions, share):
    model = model_preset(name)
    layer = model.num_experts * model.expert_parameters + model.dense_parameters
    total = model.num_layers * layer + 2 * model.vocabulary * model.hidden
    assert total == pytest.approx(billions * 1e9, rel=share)


OF_MODELS = {
    "qwen3-30b-a3b": ("qwen3_moe", {"num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 128}),
    "qwen3-235b-a22b": (
        "qwen3_moe",
        {"num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
        | {"hidden_size": 4096, "moe_intermediate_size": 1536},
    ),
    "glm-4.5": (
        "glm4_moe",
        {"num_hidden_layers": 2, "head_dim": 128, "first_k_dense_replace": 1, "hidden_size": 5120}
        | {"moe_intermediate_size": 1536, "n_routed_experts": 160},
    ),
    "glm-4.5-air": ("glm4_moe", {"num_hidden_layers": 2, "head_dim": 128}),
    "qwen3-next-80b-a3b": ("qwen3_next", {"num_hidden_layers": 4}),
    "deepseek-v3": ("deepseek_v3", {"num_hidden_layers": 4}),
    "kimi-k2": ("deepseek_v3", {"num_hidden_layers": 4, "num_attention_heads": 64, "n_routed_experts": 384}),
}
"""The model's type, and what differs from the type's own defaults, which are those of a released model."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_as_many_parameters_as_the_models_own_layers(name):
    """A mean layer of four where kinds alternate, else the last; routers, norms and convolutions left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = OF_MODELS[name]
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **changes), trust_remote_code=False
        ).model.layers
    if name != "qwen3-next-80b-a3b":
        layers = layers[-1:]
    sizes = {"experts": 0, "dense": 0}
    for part, weight in layers.named_parameters():
        if "mlp.experts" in part:
            sizes["experts"] += weight.numel() / len(layers)
        elif weight.ndim == 2 and "mlp.gate." not in part and "shared_expert_gate" not in part:
            sizes["dense"] += weight.numel() / len(layers)
    model = MODELS[name]
    assert sizes == {"experts": model.num_experts * model.expert_parameters, "dense": model.dense_parameters}
