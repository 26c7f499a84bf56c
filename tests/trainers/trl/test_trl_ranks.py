"""Two processes: DDP, FSDP2 by accelerate, transformers' expert parallelism, without plans and under them.

Routes reach the experts of both, weights are those of DDP, and metrics are of both. docs/experts.md runs there too.
"""

import io
import os
import re
from contextlib import chdir, closing, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from examples.trl.tiny import policy
from foreroute.costs import hardware_preset
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.ep.compute import StackedReplicas
from foreroute.testing.models import tiny
from foreroute.testing.ranks import Workers
from foreroute.trainers.trl import rollout_with
from foreroute.trainers.trl.planning import PlannedWindows
from tests.adapters.hf.model_runs import whole
from tests.roundings import most_k3
from tests.trainers.given_experts import follows, watched
from tests.trainers.trl.routes_book import Book, Drawn, differing_cells, log_ratios
from tests.trainers.trl.tools_runs import told_apart
from tests.trainers.trl.trl_runs import TERMS, as_torchrun_does, make

TOPOLOGY = hardware_preset("h100").topology(num_ranks=2, redundant_slots=2)
SHARDED, SPREAD = {"fsdp": True}, {"implementation": "all_to_all"}
PLANNED = {"implementation": "foreroute", "topology": TOPOLOGY}
TWO_ROLLOUTS_A_STEP = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1, "max_steps": 1}
RUNS = {
    # of the trainer, but for FSDP2 of accelerate, the implementation of expert parallelism, and a source of rollouts
    "ddp": {},
    "fsdp": SHARDED,
    "native": SHARDED | {"replay": "none", "max_steps": 1},
    "engine": SHARDED | {"source": lambda: rollout_with(EmbeddedEngine(policy(seed=1), "float32")), "max_steps": 1},
    "experts": SPREAD,
    "planned": PLANNED,
    "tolerant": PLANNED | {"plan": {"tolerance": 0.9}, "max_steps": 1},
    "R2": PLANNED | {"replay": "R2", "max_steps": 1},
    "windows at home": SPREAD | TWO_ROLLOUTS_A_STEP,
    "windows": PLANNED | TWO_ROLLOUTS_A_STEP,
    "gradients dropped": PLANNED | TWO_ROLLOUTS_A_STEP,
}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3MoeDecoderLayer",
}


def train(rank, folder):
    """What a process did in each run, and what it logs and saw without replay."""
    as_torchrun_does(rank)
    begin = AcceleratorState.__init__

    def as_on_a_gpu(self, *args, fsdp_plugin=None, **options):
        begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
        self.fsdp_plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
        if self.fsdp_plugin:
            self.distributed_type = DistributedType.FSDP

    # accelerate leaves FSDP out where there are CPUs alone
    with patch.object(AcceleratorState, "__init__", as_on_a_gpu):
        results = {name: run(rank, folder, name, **settings) for name, settings in RUNS.items()}
    AcceleratorState._reset_state(reset_partial_state=True)  # of runs before
    model = policy()
    book = Book(model, seed=rank)
    trainer = make(f"{folder}/none", model=model, rollout_func=book, max_steps=1, replay="none")
    trainer.train()
    measured = {"measured": trainer.state.log_history[0], "log_r": log_ratios(book), "cells": differing_cells(book)}
    return results | measured


def run(rank, folder, name, *, fsdp=False, implementation=None, source=None, **settings):
    AcceleratorState._reset_state(reset_partial_state=True)  # of runs before
    model, drawn = policy(), Drawn(rank, skew=0.5)
    if implementation:
        spread = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=spread)
    settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "reward_funcs": told_apart, **settings}
    dropped = patch.object(StackedReplicas, "add_returned", lambda self, returned, grads: list(grads))
    with patch.dict(os.environ, FSDP2 if fsdp else {}), dropped if name == "gradients dropped" else nullcontext():
        trainer = make(f"{folder}/{name}", model=model, rollout_func=source() if source else drawn, **settings)
        with watched(model) as batches:
            trainer.train()
    return {
        "logs": trainer.state.log_history[: trainer.state.global_step],
        "followed": [follows(batch, drawn.routes) for batch in batches if batch.grad and drawn.routes],
        "weights": torch.cat([whole(each).detach().flatten() for each in model.parameters()]),
        "sharded": sum(hasattr(each, "full_tensor") for each in model.parameters()),
    }


@pytest.fixture(scope="module")
def processes():
    with closing(Workers(2, timeout_s=500)) as workers:
        yield workers


@pytest.fixture(scope="module")
def results(processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    policy().save_pretrained(folder)
    return processes.run(train, str(folder))


@pytest.mark.slow
@pytest.mark.shows("TRL", "DDP, two processes")
@pytest.mark.shows("TRL", "FSDP2 of `accelerate`, EP of transformers, two processes")
def test_sharded_models_replay_as_whole_ones(results):
    k3 = most_k3(policy(), TERMS)
    for rank in results:
        assert min(rank["fsdp"]["sharded"], rank["experts"]["sharded"]) > 0 == rank["ddp"]["sharded"]
        for name in ("ddp", "fsdp", "experts"):
            assert len(rank[name]["followed"]) == 4
            assert all(rank[name]["followed"])
            assert rank[name]["logs"][0]["mismatch/disagreement"] == 0
            torch.testing.assert_close(rank[name]["weights"], rank["ddp"]["weights"], rtol=0, atol=1e-6)
        assert torch.equal(rank["ddp"]["weights"], results[0]["ddp"]["weights"])
        assert not any(rank["native"]["followed"])  # the control
        assert rank["native"]["logs"][0]["mismatch/disagreement"] > 0.5
        assert rank["engine"]["logs"][0]["mismatch/disagreement"] == 0
        assert rank["engine"]["logs"][0]["mismatch/k3"] < k3
        assert (rank["native"]["weights"] - rank["ddp"]["weights"]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.shows("TRL", "plans (`topology`) on EP of transformers, under R3 and R2, two processes")
def test_plans_run_and_change_no_weights(results):
    for runs in results:
        logged = [step for name in ("planned", "windows", "R2") for step in runs[name]["logs"]]
        assert len(logged) == 4
        for step in logged:
            assert step["plan/replicas"] > 0 == step["plan/rows_off"]
            assert step["plan/imbalance_executed"] == step["plan/imbalance_planned"] < step["plan/imbalance_static"]
        for name, without in {"planned": "experts", "windows": "windows at home"}.items():
            assert runs[name]["logs"][0]["mismatch/disagreement"] == 0
            assert all(runs[name]["followed"])
            torch.testing.assert_close(runs[name]["weights"], runs[without]["weights"], rtol=0, atol=1e-6)
        assert runs["tolerant"]["logs"][0]["plan/replicas"] < runs["planned"]["logs"][0]["plan/replicas"]
        off = (runs["gradients dropped"]["weights"] - runs["windows at home"]["weights"]).abs().max()
        assert off > 1e-3, "the control: gradients of replicas count"


@pytest.mark.slow
def test_metrics_are_those_of_the_tokens_of_both(results):
    log_r = np.concatenate([rank["log_r"] for rank in results]).astype(np.float64)
    cells = np.concatenate([rank["cells"] for rank in results])
    logs = results[0]["measured"]
    assert logs["mismatch/k3"] == results[1]["measured"]["mismatch/k3"]
    assert logs["mismatch/k3"] == pytest.approx(np.mean(np.exp(log_r) - 1 - log_r), rel=1e-4)
    assert logs["mismatch/disagreement"] == pytest.approx(np.mean(cells) / 3, rel=1e-9)
    alone = results[0]["log_r"].astype(np.float64)
    assert logs["mismatch/k3"] != pytest.approx(np.mean(np.exp(alone) - 1 - alone), rel=1e-2)  # the control


PAGE = Path(__file__).parents[3] / "docs" / "experts.md"
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
READERS = """
from datasets import Dataset
from examples.trl.tiny import tokenizer, vowels as reward
dataset, tokenizer = Dataset.from_dict({"prompt": [f"many vowels {n}: " for n in range(8)]}), tokenizer()
"""
"""What a reader has before the first line."""


def run_page(rank, folder, blocks):
    """What a process of torchrun prints, in the group that is there."""
    as_torchrun_does(rank)
    AcceleratorState._reset_state(reset_partial_state=True)  # of runs before
    page = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()) as printed, chdir(folder), patch.object(dist, "init_process_group") as begun:
        for block in [READERS, *blocks]:
            exec(block, page)
        begun.assert_called_once_with("gloo")
    return printed.getvalue()


@pytest.mark.shows("Hugging Face", "Trainer with gradient accumulation on spread experts, under plans, two processes")
@pytest.mark.slow
def test_the_page_of_experts_runs_and_replicas_even_the_ranks_out(processes, tmp_path):
    """Weights that are learned under plans are compared in TRL, above."""
    blocks = FENCE.findall(PAGE.read_text())
    assert len(blocks) == 6
    # of the page's sizes, with weights that make experts count
    sharp = {"vocab_size": 300, "num_experts": 16, "moe_intermediate_size": 32, "initializer_range": 0.2}
    tiny("qwen3_moe", hidden_size=64, num_hidden_layers=2, num_experts_per_tok=4, **sharp).save_pretrained(
        tmp_path / "sharp"
    )
    printed = processes.run(run_page, tmp_path, blocks)
    rows = [int(*re.findall(rf"^rank {rank} computed (\d+) rows$", printed[rank], re.MULTILINE)) for rank in (0, 1)]
    assert abs(rows[0] - rows[1]) <= 0.04 * sum(rows)


class Noting(PlannedWindows):
    """Executes nothing, and notes which micro-batches each window has, and how it ended."""

    @contextmanager
    def executing(self, micro_batches, stage):
        self.noted.append([micro_batches, None])
        try:
            yield
        except RuntimeError as error:
            self.noted[-1][1] = str(error)
            raise
        self.noted[-1][1] = "left"


def steps_of(num_iterations, accumulated, *, failing=None):
    """The windows of twelve training steps, generations of four micro-batches; one step may raise."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(steps_per_generation=4),
        num_iterations=num_iterations,
        accelerator=SimpleNamespace(),
        current_gradient_accumulation_steps=accumulated,
        _buffered_inputs=[f"micro-batch {n}" for n in range(4)],
    )
    windows = Noting(trainer, SimpleNamespace(home_LE=np.array([[0, 1]])), TOPOLOGY, {})
    windows.noted = []
    for step in range(12):
        trainer._step = step
        trainer.accelerator.sync_gradients = (step + 1) % accumulated == 0
        with nullcontext() if step != failing else pytest.raises(RuntimeError), windows.micro_step():
            windows.begin(str)
            if step == failing:
                raise RuntimeError("the loss failed")
    return windows.noted


@pytest.mark.parametrize("accumulated", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("num_iterations", [1, 3])
def test_a_window_ends_where_the_optimizer_steps_or_trl_generates(num_iterations, accumulated):
    noted = steps_of(num_iterations, accumulated)
    ends = [n for n in range(1, 13) if n % accumulated == 0 or n % (4 * num_iterations) == 0]
    expected = [[f"micro-batch {n % 4}" for n in range(a, b)] for a, b in zip([0, *ends], ends, strict=False)]
    assert [window for window, _ in noted] == expected
    assert {ended for _, ended in noted} == {"left"}


def test_an_error_ends_its_window_and_the_next_step_begins_another():
    (window, ended), (after, _), *_ = steps_of(1, 2, failing=0)
    assert (len(window), ended) == (2, "the loss failed")
    assert after[0] == "micro-batch 1"
