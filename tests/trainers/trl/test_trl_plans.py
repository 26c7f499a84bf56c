"""GRPO on experts that transformers spreads over two processes, under plans: replicas run, and weights stay those of a
run without plans.
"""

from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from examples.trl.tiny import policy
from foreroute.costs import CostModel, hardware_preset, model_preset
from foreroute.costs.cluster_file import Cluster
from foreroute.ep.compute import StackedReplicas
from foreroute.errors import ConfigError
from foreroute.trainers.trl.planning import PlannedWindows
from tests.trainers.trl.routes_book import Drawn
from tests.trainers.trl.test_trl_sharded import outcome
from tests.trainers.trl.tools_runs import told_apart
from tests.trainers.trl.trl_runs import as_torchrun_does, make, two_processes

TOPOLOGY = hardware_preset("h100").topology(num_ranks=2, redundant_slots=2)
RATES = CostModel(
    model=replace(model_preset("qwen3-30b-a3b"), num_layers=3, num_experts=8, top_k=2), hardware=hardware_preset("h100")
)
TWO_ROLLOUTS_A_STEP = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1}
RUNS = {
    "at home": {},
    "planned": {"topology": TOPOLOGY},
    "gradients dropped": {"topology": TOPOLOGY},
    "R2": {"topology": TOPOLOGY, "replay": "R2", "max_steps": 1},
    "priced": {"topology": Cluster(TOPOLOGY, RATES), "max_steps": 1},
    "windows at home": TWO_ROLLOUTS_A_STEP,
    "windows": TWO_ROLLOUTS_A_STEP | {"topology": TOPOLOGY},
}
"""Without a topology, by `"all_to_all"`."""


def train(rank, folder):
    as_torchrun_does(rank)
    results = {}
    for name, settings in RUNS.items():
        implementation = "foreroute" if "topology" in settings else "all_to_all"
        spread = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=spread)
        drawn = Drawn(rank, skew=0.5)
        of_all = {"model": model, "rollout_func": drawn, "reward_funcs": told_apart}
        of_all |= {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2}
        trainer = make(f"{folder}/{name}", **of_all | settings)
        dropped = patch.object(StackedReplicas, "add_returned", lambda self, returned, grads: list(grads))
        with dropped if name == "gradients dropped" else nullcontext():
            results[name] = outcome(trainer, model, drawn)
    for ranks, slots in ((4, 2), (2, 0)):
        unfit = hardware_preset("h100").topology(num_ranks=ranks, redundant_slots=slots)
        with pytest.raises(ConfigError, match=f"has {ranks} ranks of {slots} slots; expected 2, which share"):
            make(f"{folder}/unfit", **of_all, topology=unfit)
    return results


@pytest.mark.slow
@pytest.mark.shows("TRL", "plans (`topology`) on EP of transformers, under R3 and R2, two processes")
def test_plans_run_and_change_no_weights(tmp_path):
    policy().save_pretrained(tmp_path)
    with closing(two_processes()) as workers:
        results = workers.run(train, str(tmp_path))
    for runs in results:
        logged = [step for name in ("planned", "windows", "R2") for step in runs[name]["logs"]]
        assert len(logged) == 5
        for step in logged:
            assert step["plan/replicas"] > 0 == step["plan/rows_off"]
            assert step["plan/imbalance_executed"] == step["plan/imbalance_planned"] < step["plan/imbalance_static"]
        for name, without in {"planned": "at home", "windows": "windows at home"}.items():
            assert runs[name]["logs"][0]["mismatch/disagreement"] == 0
            assert all(runs[name]["followed"])
            torch.testing.assert_close(runs[name]["weights"], runs[without]["weights"], rtol=0, atol=1e-6)
        (priced,) = runs["priced"]["logs"]  # no plan of so small a step pays
        assert priced["plan/replicas"] == priced["plan/rows_off"] == 0
        assert priced["plan/imbalance_executed"] == priced["plan/imbalance_static"] > 1
        off = (runs["gradients dropped"]["weights"] - runs["at home"]["weights"]).abs().max()
        assert off > 1e-3, "the control: gradients of replicas count"


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
        args=SimpleNamespace(steps_per_generation=4), num_iterations=num_iterations, accelerator=SimpleNamespace()
    )
    trainer.current_gradient_accumulation_steps = accumulated
    windows = Noting(trainer, SimpleNamespace(home_LE=np.array([[0, 1]])), TOPOLOGY)
    windows.noted = []
    for step in range(12):
        trainer._step, trainer._buffered_inputs = step, [f"micro-batch {n}" for n in range(4)]
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
