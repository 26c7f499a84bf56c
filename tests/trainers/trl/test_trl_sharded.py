"""FSDP2 by accelerate, and transformers' expert parallelism over its own, two processes: routes reach the experts of
both, and the weights are those of DDP.
"""

import os
from contextlib import closing

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from examples.trl.tiny import policy
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.trainers.trl import rollout_with
from tests.adapters.hf.model_runs import whole
from tests.roundings import most_k3
from tests.trainers.trl.routes_book import Drawn, follows, watched
from tests.trainers.trl.tools_runs import told_apart
from tests.trainers.trl.trl_runs import TERMS, as_torchrun_does, make, two_processes

pytestmark = pytest.mark.slow

RUNS = {
    "fsdp": ("R3", True),
    "ddp": ("R3", False),
    "experts": ("R3", False),
    "native": ("none", True),
    "generate": ("R3", True),
    "engine": ("R3", True),
}
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3MoeDecoderLayer",
}


def train(rank, folder):
    as_torchrun_does(rank)
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
        if name == "experts":
            model = Qwen3MoeForCausalLM.from_pretrained(
                f"{folder}/policy", dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=2, ep_size=2)
            )
        settings = {"optim": "sgd", "learning_rate": 0.1, "max_steps": 2, "reward_funcs": told_apart}
        sources = {"generate": None, "engine": rollout_with(EmbeddedEngine(policy(seed=1), "float32"))}
        roll_out = sources.get(name, drawn)
        trainer = make(f"{folder}/{name}", model=model, rollout_func=roll_out, replay=replay, **settings)
        results[name] = outcome(trainer, model, drawn)
        results[name]["sharded"] = sum(hasattr(each, "full_tensor") for each in model.parameters())
    return results


def outcome(trainer, model, drawn):
    """What a run logs at each step, whether sequences followed the routes in its updates, and its weights, gathered."""
    with watched(model) as batches:
        trainer.train()
    return {
        "logs": trainer.state.log_history[: trainer.state.global_step],
        "followed": [follows(batch, drawn) for batch in batches if batch.grad and drawn.routes],
        "weights": torch.cat([whole(each).detach().flatten() for each in model.parameters()]),
    }


@pytest.mark.shows("TRL", "DDP, two processes")
@pytest.mark.shows("TRL", "FSDP2 of `accelerate`, EP of transformers, two processes")
def test_sharded_models_replay_as_whole_ones(tmp_path):
    policy().save_pretrained(tmp_path / "policy")
    with closing(two_processes()) as workers:
        results = workers.run(train, str(tmp_path))
    k3 = most_k3(policy(), TERMS)
    for rank in results:
        assert min(rank["fsdp"]["sharded"], rank["experts"]["sharded"]) > 0 == rank["ddp"]["sharded"]
        for name in ("fsdp", "experts"):
            assert len(rank[name]["followed"]) == 4
            assert all(rank[name]["followed"])
            assert rank[name]["logs"][0]["mismatch/disagreement"] == 0
            torch.testing.assert_close(rank[name]["weights"], rank["ddp"]["weights"], rtol=0, atol=1e-6)
        assert all(rank["ddp"]["followed"])
        assert rank["ddp"]["logs"][0]["mismatch/disagreement"] == 0
        assert torch.equal(rank["ddp"]["weights"], results[0]["ddp"]["weights"])
        assert not any(rank["native"]["followed"])  # the control
        assert rank["native"]["logs"][0]["mismatch/disagreement"] > 0.5
        for name in ("generate", "engine"):
            assert rank[name]["logs"][0]["mismatch/disagreement"] == 0
            assert rank[name]["logs"][0]["mismatch/k3"] < k3
        assert (rank["native"]["weights"] - rank["ddp"]["weights"]).abs().max() > 1e-3
