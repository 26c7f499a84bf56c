"""The cost model by hand and by a slow oracle, presets against published sizes, and the finder of rates."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.costs import links
from foreroute.costs.fitting import find_rates, require_distinct_effects, value_of, with_values
from foreroute.costs.links import served_loads
from foreroute.costs.model import BACKWARD, CostModel
from foreroute.costs.presets import HARDWARE, MODELS, model_preset
from foreroute.costs.pricing import least_seconds, parts_of_cells, slowest_attention, step_parts, work_of_cells
from foreroute.errors import ConfigError, PlanError
from foreroute.plan import Topology
from foreroute.plan.hosts import CellPlan, Hosts
from tests.costs.cost_oracle import oracle, price_cell, price_plan
from tests.plan.random_plans import LINKS, changed, random_counts, random_plan

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
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = OF_MODELS[name]
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **changes), trust_remote_code=False
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


CONFIGURED = CostModel(
    model=MODELS["qwen3-30b-a3b"], hardware=replace(HARDWARE["h100"], replica_s=1e-4, replica_backward_s=2e-4)
)
NAMES = ("gemm_flops_per_s", "node_bytes_per_s", "layer_s", "backward_products", "replica_s")
TIME = {"gemm_flops_per_s": 1e12, "node_bytes_per_s": 1e9}
"""What of each rate is done in a unit of work; parameters that are no rates count as they are."""


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), factors=st.lists(st.floats(0.05, 20), min_size=5, max_size=5))
def test_parameters_that_made_the_seconds_are_found(seed, factors):
    """Seconds are linear in what time is proportional to; parameters are these factors of what is configured."""
    weight_VK = np.random.default_rng(seed).gamma(0.5, size=(14, len(NAMES)))

    def cost_K(costs):
        values = {name: value_of(costs.hardware, name) for name in NAMES}
        return np.array([TIME[name] / value if name in TIME else value for name, value in values.items()])

    def predicted(costs):
        return weight_VK @ (cost_K(costs) / cost_K(CONFIGURED))

    truth = {name: float(f) * value_of(CONFIGURED.hardware, name) for name, f in zip(NAMES, factors, strict=True)}
    measured_V = predicted(with_values(CONFIGURED, truth))
    found = find_rates(CONFIGURED, NAMES, predicted, measured_V, measured_V).costs
    np.testing.assert_allclose(predicted(found), measured_V, rtol=1e-6)
    np.testing.assert_allclose([value_of(found.hardware, name) for name in NAMES], [*truth.values()], rtol=1e-4)


@pytest.mark.parametrize(
    ("share_VK", "words"),
    [
        ([[1.0, 0.0], [2.0, 1e-12]], r"depends.*layer_s"),
        ([[1.0, 2.0], [2.0, 4.0 + 1e-9]], r"tell gemm_flops_per_s, layer_s apart"),
    ],
)
def test_parameters_without_effects_of_their_own_are_refused(share_VK, words):
    names = ("gemm_flops_per_s", "layer_s")
    with pytest.raises(ConfigError, match=words):
        require_distinct_effects(np.array(share_VK), names)
    require_distinct_effects(np.array([[1.0, 1e-6], [2.0, 0.0]]), names)


SMALL = replace(MODELS["qwen3-30b-a3b"], top_k=2, num_experts=8)
OF_FEW = CostModel(model=SMALL, hardware=HARDWARE["h100"])


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(8, 2), (4, 4), (4, 1)])
def test_figures_equal_the_slow_oracle(num_ranks, ranks_per_node):
    """Of cells with hosts of no merit."""
    topology = Topology(num_ranks, ranks_per_node, 2, LINKS)
    for seed, dispatcher, paths in itertools.product(range(8), ("copies", "dedup"), ("host", "direct")):
        rng, model = np.random.default_rng(seed), replace(SMALL, top_k=1 + seed % 3)
        costs = replace(OF_FEW, model=model, dispatcher=dispatcher, paths=paths)
        counts_GE = rng.multinomial(model.top_k * rng.integers(0, 40, num_ranks), rng.dirichlet(np.full(8, 0.5)))
        cell = random_plan(counts_GE[None, None], topology, seed=seed).cell(0, 0)
        slots = ("layer", "shared")[seed // 2 % 2]
        parts_SP = price_cell(cell, counts_GE, topology, costs, slots)
        expected, rows = oracle(cell, counts_GE, topology, costs, slots)
        for parts_P, pass_name in zip(parts_SP, ("recompute", "update"), strict=True):
            assert parts_P.tolist() == pytest.approx(list(expected[pass_name].values()), rel=1e-12)
        hosts = Hosts.of_cells(cell.home_E[None], [cell])
        rows_G4 = work_of_cells(hosts, counts_GE[None, None], costs.prices(topology)).rows_MLG4[0, 0]
        for link, direction in itertools.product(("cluster", "node"), ("out", "in")):
            by_hand = [rows.get((link, direction, g), 0) for g in range(num_ranks)]
            assert rows_G4[:, getattr(links, f"{link}_{direction}".upper())] == pytest.approx(by_hand, rel=1e-12)


def test_the_estimate_of_deduplicated_rows_is_near_the_count_of_routes():
    """Under the homes alone: each token to a node once, and there to a rank once."""
    rng, topology, cluster, node = np.random.default_rng(1), HARDWARE["h100"].topology(16, 0), 0, 0
    width, home_E, rank_T = topology.ranks_per_node, topology.contiguous_home_LE(1, 128)[0], np.arange(8000) % 16
    ids_TK = np.argsort(rng.gumbel(size=(8000, 128)) + rng.normal(size=128), axis=1)[:, -8:]
    counts_MLGE = np.zeros((1, 1, 16, 128), int)
    np.add.at(counts_MLGE[0, 0], (rank_T[:, None], ids_TK), 1)
    for source, ranks in zip(rank_T.tolist(), home_E[ids_TK].tolist(), strict=True):
        for there in {rank // width for rank in ranks}:
            enters = source if there == source // width else there * width + source % width
            cluster += enters != source
            node += sum(rank // width == there and rank != enters for rank in set(ranks))
    costs = replace(OF_FEW, model=MODELS["qwen3-30b-a3b"], dispatcher="dedup")
    hosts = Hosts.with_room(home_E[None], 1, 16, 0)
    estimate_4 = work_of_cells(hosts, counts_MLGE, costs.prices(topology)).rows_MLG4.sum(axis=(0, 1, 2))
    assert 0.997 < estimate_4[links.CLUSTER_OUT] / cluster < 1
    assert 0.95 < estimate_4[links.NODE_OUT] / node < 0.97


COUNTS = random_counts(0, (3, 2, 4, 8)).astype(np.int32)
TOPOLOGY = Topology(4, 2, 2, LINKS)
PLAN = random_plan(COUNTS, TOPOLOGY, seed=1)
PRICES = OF_FEW.prices(TOPOLOGY)


def hosts_with(name, place, value):
    return changed(PLAN, name, place, value).hosts


UNFIT = {
    "a rank below 0": (hosts_with("rank_R", 1, -1), "rank_R.*-1 to"),
    "an expert that is not there": (hosts_with("expert_R", 0, 8), "expert_R.*8.*0 to 7"),
    "a home that is not there": (hosts_with("home_LE", (1, 3), 9), "home_LE.*9.*0 to 3"),
    "offsets that go back": (hosts_with("offsets", 2, 0), "offsets"),
    "offsets of fewer cells": (PLAN.hosts._replace(offsets=PLAN.hosts.offsets[:-1]), "offsets are 6.*expected 7"),
    "homes of fewer layers": (PLAN.hosts._replace(home_LE=PLAN.hosts.home_LE[:1]), r"home_LE.*\[1, 8\].*\[2, 8\]"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_hosts_that_do_not_fit_are_refused_by_every_door(name):
    hosts, message = UNFIT[name]
    attention_ML2 = slowest_attention(COUNTS, OF_FEW)
    for door in (
        lambda: served_loads(hosts, COUNTS, 2),
        lambda: step_parts(hosts, COUNTS, TOPOLOGY, OF_FEW),
        lambda: parts_of_cells(hosts, COUNTS, attention_ML2, PRICES),
        lambda: work_of_cells(hosts, COUNTS, PRICES),
    ):
        with pytest.raises(PlanError, match=message):
            door()


@pytest.mark.parametrize("dispatcher", ["copies", "dedup"])
def test_no_plan_is_faster_and_level_local_tokens_attain_the_bound(dispatcher):
    for seed in range(20):
        costs = replace(OF_FEW, dispatcher=dispatcher, paths=("host", "direct")[seed % 2])
        ranks = (1, 2, 4, 8)[seed % 4]
        counts = random_counts(seed, (2, 2, ranks, 16), most=(3, 300, 30_000)[seed % 3])
        plan = random_plan(counts, Topology(ranks, max(ranks // 2, 1), 2 if ranks > 1 else 0, LINKS), seed=seed)
        least_ML = least_seconds(counts, plan.topology, costs)
        assert (price_plan(plan, counts, costs) >= least_ML * (1 - 1e-12)).all()
        if ranks == 1:
            np.testing.assert_allclose(price_plan(plan, counts, costs), least_ML, rtol=1e-12)
    # every rank sends the same, whole tiles, to its own expert: no byte moves
    counts = 1280 * np.eye(4, dtype=np.int64)[None, None]
    plan = random_plan(counts, Topology(4, 2, 0, LINKS))
    plan.home_LE[:] = np.arange(4)
    np.testing.assert_allclose(
        price_plan(plan, counts, OF_FEW), least_seconds(counts, plan.topology, OF_FEW), rtol=1e-12
    )


def test_a_step_is_the_sum_of_its_cells():
    counts = np.random.default_rng(0).integers(0, 40, (2, 3, 4, 8), dtype=np.int32)
    hosts = random_plan(counts, TOPOLOGY, seed=1).hosts
    cells = [price_cell(hosts.cell(m, layer), counts[m, layer], TOPOLOGY, OF_FEW) for m, layer in np.ndindex(2, 3)]
    np.testing.assert_allclose(step_parts(hosts, counts, TOPOLOGY, OF_FEW), sum(cells), rtol=1e-12)
