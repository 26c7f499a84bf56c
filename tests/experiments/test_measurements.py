"""What the cells measure, on a model that is trained in a second."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from experiments import training
from experiments.arms import reward_last
from experiments.cells import Cell
from experiments.models import base_values, configuration, merged
from experiments.series import stale_shares
from experiments.starts import started
from experiments.static import run_static
from experiments.tampering import shifted
from experiments.training import run_training
from foreroute.errors import DivergedError
from foreroute.trace import RoutingTrace
from foreroute.train import run
from foreroute.train.folder import load_checkpoint
from foreroute.train.policy import make_policy
from foreroute.train.prompts import make_task
from tests.train.small_runs import small_values

DOOR = run.make_engine


def small(**sections):
    return merged(small_values(), {"rollout": {"precision": "fp8"}, "measure": {"compare_every": 1}, **sections})


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return started(tmp_path_factory.mktemp("starts"), "moe", small(), 3)


def cell(kind, shifted=False, **settings):
    return Cell("T", kind, 3, "moe", settings, shifted)


def test_a_start_is_made_once(start):
    state = load_checkpoint(start)
    assert state["step"] == 0
    written = start.stat().st_mtime_ns
    assert started(start.parent, "moe", small(), 3) == start
    assert start.stat().st_mtime_ns == written
    assert {path.name for path in start.parent.iterdir()} == {"moe-3.safetensors", "moe-3.lock"}


def test_at_fixed_weights_replay_lowers_what_precision_raised(start):
    coarse = run_static(cell("static"), small(), start)
    assert coarse["none"]["differing_share"] > 0
    assert coarse["R3"]["differing_share"] == 0
    assert coarse["R3"]["k3"] < coarse["none"]["k3"] < coarse["shifted"]["k3"]
    exact = run_static(cell("static", rollout={"precision": "float32"}), small(), start)
    assert max(exact[how]["k3"] for how in ("none", "R3")) < 1e-9
    assert exact["shifted"]["k3"] > 1e-6, "the control is seen to fail"


@pytest.mark.slow
def test_figures_of_a_run_are_those_of_its_records(start, monkeypatch):
    kept = []

    def keeping(config, folder):
        kept.append(run.train(config, folder).path.joinpath("metrics.jsonl").read_text())

    monkeypatch.setattr(training, "train", keeping)
    rl = {"routing": "R2", "mini_steps": 3, "steps": 3, "learning_rate": 1e-2}
    found = run_training(cell("train", rl=rl), small(), start)
    records = [json.loads(line) for line in kept[0].splitlines()]
    assert found["steps"] == 3
    assert found["reward"] == [round(record["reward_mean"], 4) for record in records]
    native = [record["mismatch"]["native"] for record in records]
    assert found["mean"]["k3"] == pytest.approx(np.mean([each["k3"] for each in native]), rel=1e-4)
    assert found["binned"]["f1.5"] == [float(f"{each['f1.5']:.4g}") for each in native]
    assert found["spikes"] == np.mean([record["grad_norm"] > 10 for record in records])
    assert (found["collapsed_at"], found["diverged"]) == (None, False)
    assert found["stale_share_by_mini_step"][0] == 0, "R2 replays routes of these weights"
    assert min(found["stale_share_by_mini_step"][1:]) > 0


@pytest.mark.slow
def test_routes_go_stale_as_the_weights_move(start):
    """Replayed routes of the same weights and precision are the routers' own, until the first optimizer step."""
    rl = {"routing": "R3", "mini_steps": 3, "steps": 1, "learning_rate": 1e-2, "warmup_steps": 0}
    exact = run_training(cell("train", rl=rl, rollout={"precision": "float32", "prompts": 12}), small(), start)
    assert exact["stale_share_by_mini_step"][0] == 0
    assert min(exact["stale_share_by_mini_step"][1:]) > 0
    assert stale_shares([{"step": 0}, {"step": 1}]) == [], "nothing is replayed"
    watched = [{"live_agreement": [0.9, 0.7]}, {"live_agreement": [0.8]}, {"live_agreement": [1.0, 0.8]}, {}]
    assert stale_shares(watched) == [0.05, 0.25]


@pytest.mark.slow
def test_shifted_routes_reach_the_trainer_and_diverged_runs_are_results(start, monkeypatch):
    rl = {"routing": "R3", "steps": 1}
    right, wrong = (run_training(cell("train", off, rl=rl), small(), start) for off in (False, True))
    assert wrong["mean"]["k3"] > 2 * right["mean"]["k3"]
    assert 0 < right["stale_share_by_mini_step"][0] < wrong["stale_share_by_mini_step"][0]
    assert run.make_engine is DOOR

    def diverging(config, folder):
        run.train(config, folder)
        raise DivergedError("loss nan")

    monkeypatch.setattr(training, "train", diverging)
    found = run_training(cell("train", rl=rl), small(), start)
    assert (found["diverged"], found["collapsed_at"]) == (True, 1)
    monkeypatch.setattr(training, "train", Mock(side_effect=DivergedError("loss nan")))
    found = run_training(cell("train", rl=rl), small(), start)
    assert (found["diverged"], found["collapsed_at"], found["steps"], reward_last(found)) == (True, 0, 0, 0.0)


def test_shifted_traces_hold_the_routes_of_the_token_before():
    config = configuration(small(), {}, 0)
    spec = make_policy(config, make_task(config)).spec
    rng = np.random.default_rng(0)
    lengths = [5, 1, 7]
    ids = [rng.permuted(np.tile(np.arange(16), (n - 1, 2, 1)), axis=2)[:, :, :2] for n in lengths]
    trace = RoutingTrace.from_sequences(spec, [np.arange(n) for n in lengths], ids, weight_version=4)
    off = shifted(trace)
    assert np.array_equal(off.token_ids_N, trace.token_ids_N)
    assert np.array_equal(off.valid_N, trace.valid_N)
    for s, routes in enumerate(ids):
        found = off.expert_ids_NLK[trace.offsets[s] : trace.offsets[s + 1] - 1]
        for position in range(len(routes)):
            assert np.array_equal(found[position], routes[position - 1])


def test_the_dense_control_is_a_dense_model():
    """With the weights of its only expert, transformers' dense Qwen3 computes the same."""
    config = configuration(base_values("dense"), {}, 0)
    policy = make_policy(config, make_task(config)).model
    kept = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    sizes = {key: value for key, value in config.model.sizes.items() if key in kept}
    vocabulary, head = policy.config.vocab_size, sizes["hidden_size"] // sizes["num_attention_heads"]
    dense = AutoModelForCausalLM.from_config(
        Qwen3Config(**sizes, intermediate_size=64, vocab_size=vocabulary, head_dim=head), trust_remote_code=False
    )
    weights = policy.state_dict()
    for layer in range(4):
        mlp = f"model.layers.{layer}.mlp."
        both = weights.pop(f"{mlp}experts.gate_up_proj")[0]
        gate, up = both.chunk(2)
        down = weights.pop(f"{mlp}experts.down_proj")[0]
        del weights[f"{mlp}gate.weight"]
        weights |= {f"{mlp}gate_proj.weight": gate, f"{mlp}up_proj.weight": up, f"{mlp}down_proj.weight": down}
    dense.load_state_dict(weights)
    tokens = torch.randint(0, vocabulary, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(dense(tokens).logits, policy(tokens).logits, atol=1e-5, rtol=1e-5)
        other = torch.randn_like(policy.model.layers[0].mlp.experts.down_proj)
        policy.model.layers[0].mlp.experts.down_proj.copy_(other)
        assert not torch.allclose(dense(tokens).logits, policy(tokens).logits, atol=1e-2)
