"""DeepSpeed by accelerate, two processes: routes reach the experts of both, and weights are those of one process."""

from contextlib import closing

import pytest
import torch
from peft import LoraConfig

from examples.trl.tiny import policy
from foreroute.testing.ranks import Workers
from tests.roundings import most_k3
from tests.settings.comparing import config, import_deepspeed, needs
from tests.trainers.trl.trl_runs import NO_AUXILIARY, TERMS, make

pytestmark = [needs("deepspeed"), pytest.mark.slow]

ALL_AT_ONCE = {
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    **NO_AUXILIARY,
}
"""Both steps are of the whole rollout, without a loss of single micro-batches: it does not matter how sequences are
dealt out."""


def train(folder, *, saved=None, replay="R3", samples=False, **settings):
    """The policy at the end, what the run logs, and whether its updates followed the routes.

    A policy that is `saved` is loaded by transformers, in parts at ZeRO stage 3; unless an engine samples, rollouts are
    drawn.
    """
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    from foreroute.engines.embedded import EmbeddedEngine
    from foreroute.trainers.trl import rollout_with
    from tests.trainers.given_experts import follows, watched
    from tests.trainers.trl.routes_book import Drawn
    from tests.trainers.trl.tools_runs import told_apart

    model, drawn = policy(), Drawn()
    if saved is not None:
        model, settings = saved, {"model_init_kwargs": {"dtype": torch.float32}} | settings
    source = drawn
    if samples:
        alive = HfDeepSpeedConfig(settings["deepspeed"]) if "deepspeed" in settings else None  # of a trainer before
        source = rollout_with(EmbeddedEngine(policy(seed=1), "float32"))
        assert is_deepspeed_zero3_enabled() is (alive is not None)
    torch.manual_seed(0)  # of adapters
    trainer = make(
        folder, model=model, rollout_func=source, reward_funcs=told_apart, replay=replay, **ALL_AT_ONCE | settings
    )
    model = trainer.model
    with watched(model) as batches:
        trainer.train()
    updates = [batch for batch in batches if batch.grad]
    return model, {
        "logs": trainer.state.log_history,
        "followed": [follows(batch, drawn.routes) for batch in updates if drawn.routes],
    }


def alone(rank, folder):
    """Without adapters, and with them."""
    results = []
    for settings in ({}, {"peft_config": ADAPTERS}):
        model, found = train(f"{folder}/alone", per_device_train_batch_size=4, **settings)
        results.append(found | {"weights": flat(model)})
    return results


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()])


SAVED = "policy"
ADAPTERS = LoraConfig(
    r=4, target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
)
RUNS = {
    "zero-2": (2, {}),
    "zero-3": (3, {}),
    "adapters": (3, {"saved": SAVED, "peft_config": ADAPTERS}),
    "none": (3, {"replay": "none"}),
    # the second rollout is of weights that a step has changed
    "engine": (3, {"samples": True, "num_iterations": 1}),
}


def under_deepspeed(rank, folder):
    """Each run, and of how many of its parameters this process held nothing at the end."""
    deepspeed = import_deepspeed(rank)
    from accelerate.state import DistributedType, PartialState

    # accelerate finds no backend for DeepSpeed where there are CPUs alone
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    results = {}
    for name, (stage, settings) in RUNS.items():
        settings = {each: f"{folder}/{value}" if each == "saved" else value for each, value in settings.items()}
        own = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        given = config(stage) | dict.fromkeys(own, "auto")  # accelerate fills them in of a trainer's own
        model, found = train(f"{folder}/{name}", use_cpu=False, deepspeed=given, **settings)
        found["partitioned"] = sum(each.numel() == 0 for each in model.parameters())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            found["weights"] = flat(model)
        results[name] = found
    return results


@pytest.mark.shows("TRL", "DeepSpeed ZeRO-2 and ZeRO-3, with LoRA too, two processes")
def test_partitioned_models_replay_as_whole_ones(tmp_path):
    policy().save_pretrained(tmp_path / SAVED)
    with closing(Workers(1, timeout_s=300)) as workers:
        ((single, adapted),) = workers.run(alone, str(tmp_path))
    with closing(Workers(2, timeout_s=500)) as workers:
        results = workers.run(under_deepspeed, str(tmp_path))
    assert all(single["followed"] + adapted["followed"])
    k3 = most_k3(policy(), 4 * TERMS)  # twice as far off: no step moves a row of the head by its own length
    for rank in results:
        assert rank["zero-3"]["partitioned"] > 0 == rank["zero-2"]["partitioned"]
        for name in ("zero-2", "zero-3", "adapters"):
            assert len(rank[name]["followed"]) == 4
            assert all(rank[name]["followed"])
            assert rank[name]["logs"][0]["mismatch/disagreement"] == 0
            expected = adapted if name == "adapters" else single
            torch.testing.assert_close(rank[name]["weights"], expected["weights"], rtol=0, atol=1e-6)
        assert not any(rank["none"]["followed"])  # the control
        assert (rank["none"]["weights"] - single["weights"]).abs().max() > 1e-3
        rollouts = [entry for entry in rank["engine"]["logs"] if "mismatch/k3" in entry]
        assert len(rollouts) == 2
        assert all(entry["mismatch/disagreement"] == 0 for entry in rollouts)
        assert all(entry["mismatch/k3"] < k3 for entry in rollouts)
