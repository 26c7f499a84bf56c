"""Small valid files of every kind that the command line reads."""

import json

import numpy as np
import tomli_w

from tests import wires
from tests.simulate.simulate_cases import small_values
from tests.train import small_runs
from tests.train.small_runs import SIZES

LAYERS, EXPERTS, PICKS = (SIZES[name] for name in ("num_hidden_layers", "num_experts", "num_experts_per_tok"))
CLUSTER = {
    "topology": {"num_ranks": 2, "ranks_per_node": 2, "redundant_slots": 1},
    "hardware": {"preset": "h100"},
    "model": {"preset": "qwen3-30b-a3b", "num_experts": EXPERTS, "top_k": PICKS},
}
SIMULATION = small_values(gpus=4, expert_parallel=2, experts=EXPERTS, micro_steps=1, planning_s=0.25)
SIMULATION["methods"], SIMULATION["model"]["num_layers"] = ["foreroute"], LAYERS
MODEL = SIZES | {"vocab_size": 50, "head_dim": 8}
TRAINING = small_runs.small_values(
    warm_start={"max_steps": 1, "batch_size": 4},
    rollout={"prompts": 2, "group_size": 2},
    rl={"steps": 2, "warmup_steps": 1},
    checkpoint={"every": 1},
    measure={"save_trace_every": 1},
)


def write_files(folder):
    """Fill an empty folder with a trace, counts, a plan, configurations, a run, a model and a generation."""
    import foreroute as fr
    from foreroute.costs.cluster_file import load_cluster
    from foreroute.plan import save_counts, save_plan
    from foreroute.planner import plan
    from foreroute.testing.routes import synthetic_trace

    for name, values in {"cluster": CLUSTER, "simulate": SIMULATION, "train": TRAINING}.items():
        (folder / f"{name}.toml").write_text(tomli_w.dumps(values))
    layers = tuple(fr.RoutedLayer(layer) for layer in range(LAYERS))
    trace = synthetic_trace(fr.RoutingSpec(EXPERTS, PICKS, layers), [9, 7], seed=0)
    fr.save(trace, folder / "trace.safetensors")
    counts = np.random.default_rng(0).poisson(20, (1, LAYERS, 2, EXPERTS))
    save_counts(counts, folder / "counts.safetensors")
    before = plan(counts + 1, load_cluster(folder / "cluster.toml").topology)  # of the step before
    save_plan(before, folder / "plan.safetensors")
    line = {"counts": "counts.safetensors", "plan": None, "pass_name": "recompute", "seconds": 0.004}
    (folder / "measured.jsonl").write_text("".join(json.dumps(line | {"seconds": s}) + "\n" for s in (0.004, 0.011)))
    (folder / "model").mkdir()  # whose configuration is enough to know its layers
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"} | MODEL))
    request = wires.rollout(np.random.default_rng(0), experts=EXPERTS, top_k=PICKS, layers=LAYERS, dense=0)
    (folder / "answer.json").write_text(wires.vllm_http(request))
    (folder / "no-tokens.json").write_text(wires.sglang_openai(request))
    (folder / "tokens.json").write_text(json.dumps([request.tokens]))
    _write_models(folder)


def _write_models(folder):
    """A run with checkpoints and rollouts, a model's folder, and a generation."""
    import torch
    from transformers.utils import logging

    from foreroute.adapters import hf
    from foreroute.capture import Sampling, save_generation
    from foreroute.engines.embedded import EmbeddedEngine
    from foreroute.records import read_runs
    from foreroute.report.run import write_report
    from foreroute.trace import save
    from foreroute.train import load_config, train

    logging.disable_progress_bar()
    train(load_config(folder / "train.toml"), folder / "run")
    write_report(read_runs([folder / "run"]), folder / "run" / "report.html")
    model = hf.build_model("qwen3_moe", seed=0, **MODEL)
    model.save_pretrained(folder / "model")
    engine = EmbeddedEngine(model, "float32")
    engine.load_weights(model.state_dict(), 1)
    sampling = Sampling(group_size=1, max_new_tokens=4, end_token=49)
    prompts = [np.arange(1, 5, dtype=np.int32), np.arange(2, 8, dtype=np.int32)]
    generation = engine.generate(prompts, sampling, torch.Generator().manual_seed(0))
    save_generation(generation, folder / "generation.safetensors")
    save(generation.trace, folder / "engine.safetensors")
