"""FSDP2 by accelerate, and transformers' expert parallelism over its own, two processes: routes reach the experts of
both, and the weights are those of DDP. Under plans too, whose replicas run.
"""

import os
from contextlib import closing, nullcontext
from unittest.mock import patch

import numpy as np
import pytest
import torch

from examples.trl.tiny import policy
from foreroute.testing.ranks import Workers
from tests.roundings import most_k3
from tests.trainers.trl.trl_runs import TERMS

pytestmark = pytest.mark.slow

RUNS = {
    "fsdp": ("R3", True),
    "ddp": ("R3", False),
    "experts": ("R3", False),
    "native": ("none", True),
    "generate": ("R3", True),
    "engine": ("R3", True),
    "planned": ("R3", False),
    "planned R2": ("R2", False),
    "gradients dropped": ("R3", False),
    "windows": ("R3", False),
    "planned windows": ("R3", False),
}
ON_EXPERTS = [name for name in RUNS if "planned" in name or name in ("experts", "gradients dropped", "windows")]
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3MoeDecoderLayer",
}


class Drawn:
    """A `rollout_func` of tokens and routes that no model had a part in. `routes` is by tokens, as a `Book` has it.

    Experts of the first rank are wanted most.
    """

    def __init__(self, rank):
        self.routes, self._rng = {}, np.random.default_rng(rank)

    def __call__(self, prompts, trainer):
        prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = [self._rng.integers(2, 200, self._rng.integers(2, 10)).tolist() for _ in prompts]
        for prompt, completion in zip(prompt_ids, completions, strict=True):
            shape = (len(prompt) + len(completion) - 1, 3, 8)
            self.routes[tuple(prompt + completion)] = np.argsort(
                self._rng.random(shape) + np.linspace(0, 0.5, 8), axis=-1
            )[..., :2]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": [[-3.0] * len(completion) for completion in completions],
            "routed_experts": list(self.routes.values())[-len(prompts) :],
        }


def train(rank, folder):
    """What each run logs, how many sequences followed the routes in its updates, and its weights, gathered."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ |= {name: str(value) for name, value in environment.items()}

    from accelerate.state import AcceleratorState, DistributedType
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    from foreroute.costs import hardware_preset
    from foreroute.engines.embedded import EmbeddedEngine
    from foreroute.ep.compute import StackedReplicas
    from foreroute.trainers.trl import rollout_with
    from tests.trainers.trl.routes_book import follows, watched
    from tests.trainers.trl.tools_runs import told_apart
    from tests.trainers.trl.trl_runs import make

    begin = AcceleratorState.__init__

    def as_on_a_gpu(self, *args, fsdp_plugin=None, **options):
        begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
        self.fsdp_plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
        if self.fsdp_plugin:
            self.distributed_type = DistributedType.FSDP

    # accelerate leaves FSDP out where there are CPUs alone
    AcceleratorState.__init__ = as_on_a_gpu
    results = {}
    for name, (replay, is_sharded) in RUNS.items():
        for setting, value in FSDP2.items():
            os.environ.pop(setting, None)
            if is_sharded:
                os.environ[setting] = value
        AcceleratorState._reset_state(reset_partial_state=True)
        model, drawn = policy(), Drawn(rank)
        settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 3, "reward_funcs": told_apart}
        if name in ON_EXPERTS:
            implementation = "auto" if name in ("experts", "windows") else "foreroute"
            spread = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
            model = Qwen3MoeForCausalLM.from_pretrained(
                f"{folder}/policy", dtype=torch.float32, distributed_config=spread
            )
            if implementation == "foreroute":
                settings["topology"] = hardware_preset("h100").topology(num_ranks=2, redundant_slots=2)
            if "windows" in name:  # two generation batches for a step of the optimizer
                settings |= {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 1}
        sources = {"generate": None, "engine": rollout_with(EmbeddedEngine(policy(seed=1), "float32"))}
        roll_out = sources.get(name, drawn)
        trainer = make(f"{folder}/{name}", model=model, rollout_func=roll_out, replay=replay, **settings)
        dropped = patch.object(StackedReplicas, "add_home", lambda self, returned, grads: list(grads))
        with watched(model) as batches, dropped if name == "gradients dropped" else nullcontext():
            trainer.train()
        weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
        updates = [batch for batch in batches if batch.grad]
        results[name] = {
            "sharded": sum(hasattr(each, "full_tensor") for each in model.parameters()),
            "logs": trainer.state.log_history,
            "steps": trainer.state.global_step,
            "followed": [follows(batch, drawn) for batch in updates if drawn.routes],
            "weights": torch.cat([each.detach().flatten() for each in weights]),
        }
    return results


@pytest.mark.shows("TRL", "FSDP2 of `accelerate`, EP of transformers, two processes")
@pytest.mark.shows("TRL", "plans (`topology`) on EP of transformers, under R3 and R2, two processes")
def test_sharded_models_replay_as_whole_ones(tmp_path, compiled_planner):
    policy().save_pretrained(tmp_path / "policy")
    with closing(Workers(2, timeout_s=500)) as workers:
        results = workers.run(train, str(tmp_path))
    k3 = most_k3(policy(), TERMS)
    for rank in results:
        assert min(rank["fsdp"]["sharded"], rank["experts"]["sharded"]) > 0 == rank["ddp"]["sharded"]
        for name in ("fsdp", "experts"):
            assert len(rank[name]["followed"]) == 6
            assert all(rank[name]["followed"])
            assert rank[name]["logs"][0]["mismatch/disagreement"] == 0
            torch.testing.assert_close(rank[name]["weights"], rank["ddp"]["weights"], rtol=0, atol=1e-6)
        assert all(rank["ddp"]["followed"])
        assert not any(rank["native"]["followed"])  # the control
        assert rank["native"]["logs"][0]["mismatch/disagreement"] > 0.5
        for name in ("generate", "engine"):
            assert rank[name]["logs"][0]["mismatch/disagreement"] == 0
            assert rank[name]["logs"][0]["mismatch/k3"] < k3
        _require_planned(rank)
        assert (rank["native"]["weights"] - rank["ddp"]["weights"]).abs().max() > 1e-3


def _require_planned(rank):
    """Replicas ran, nothing was computed elsewhere than planned, and weights are those of the run without plans."""
    for name, without in {"planned": "experts", "planned R2": None, "planned windows": "windows"}.items():
        logged = rank[name]["logs"][: rank[name]["steps"]]
        for step in logged:
            assert step["plan/replicas"] > 0 == step["plan/rows_off"]
            assert step["plan/imbalance_executed"] == step["plan/imbalance_planned"] < step["plan/imbalance_static"]
        if without is not None:
            assert logged[0]["mismatch/disagreement"] == 0
            assert all(rank[name]["followed"])
            torch.testing.assert_close(rank[name]["weights"], rank[without]["weights"], rtol=0, atol=1e-6)
    off = (rank["gradients dropped"]["weights"] - rank["experts"]["weights"]).abs().max()
    assert off > 1e-3, "the control: gradients of replicas count"
