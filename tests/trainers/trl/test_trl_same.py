"""What replay leaves alone is bit for bit TRL's own."""

import re
from functools import partial

import pytest
import torch
import trl
from peft import LoraConfig

from examples.trl.tiny import agent, policy, vowels
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import ForerouteError
from foreroute.trainers.trl import RoutingReplay
from tests.tiers import grid
from tests.trainers.trl import tools_runs
from tests.trainers.trl.routes_book import Book
from tests.trainers.trl.trl_runs import NO_AUXILIARY, logged, make, saved_policy, trained

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=EXPERTS, init_lora_weights=False)
TIMES = ("time", "_per_second")

TWO_REWARDS = {"reward_funcs": [vowels, tools_runs.told_apart], "reward_weights": [1.0, 0.3]}
CUTS = {"temperature": 0.7, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
REFERENCE = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "use_bias_correction_kl": False}
LORAS = {"peft_config": LORA, "beta": 0.1}
AUTOCAST = {"bf16": True, "cast_lm_head_to_fp32": True}
BY_DAY = {
    "one-update": {"num_iterations": 1, "steps_per_generation": 2, "loss_type": "grpo"},
    "tools": {"run": tools_runs.trained, "model": agent},
    "grpo, reference": {"loss_type": "grpo", "scale_rewards": "batch", "num_iterations": 3} | REFERENCE | TWO_REWARDS,
    "dr_grpo, lora": {"loss_type": "dr_grpo", "scale_rewards": "none", "off_policy_mask_threshold": 1e-3}
    | LORAS
    | CUTS,
    "environment": {"run": tools_runs.trained, "model": agent, "tools": (), "environment_factory": tools_runs.Counter},
}
BY_NIGHT = {
    # they differ in what TRL alone computes
    "bnpo": {"loss_type": "bnpo", "delta": 1.5, "epsilon_high": 0.3, "gradient_checkpointing": False},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "top_entropy_quantile": 0.5},
    "sapo": {"loss_type": "sapo", "mask_truncated_completions": True, "model": agent, "max_completion_length": 40},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"} | AUTOCAST,
    "vespo": {"loss_type": "vespo", **NO_AUXILIARY},
}


def run_of(folder, *, run=trained, cls=trl.GRPOTrainer, model=None, rollout_func=None, **settings):
    """A run of these settings, in which what a run changes is made anew."""
    if "replay" in settings:
        cls = type("Replaying", (RoutingReplay, cls), {})
    model = model() if model else saved_policy(f"{folder}/policy") if "beta" in settings else policy()
    if rollout_func:
        settings["rollout_func"] = rollout_func(model)
    if run is trained:
        settings.setdefault("reward_funcs", tools_runs.told_apart)
    return run(folder, cls=cls, model=model, **settings)


def require_same(folder, **settings):
    """Train as TRL does, and without replay: with all metrics and weights of TRL. Gives the second."""
    plain, watched = run_of(folder, **settings), run_of(folder, **settings, replay="none")
    for one, other in zip(plain.state.log_history, watched.state.log_history, strict=True):
        kept = {name: value for name, value in one.items() if not name.endswith(TIMES)}
        assert kept == {name: other[name] for name in kept}
    assert max(logged(plain, "grad_norm")) > 0
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    return watched


@pytest.mark.shows(
    "TRL", '`replay="none"` with every loss type, reference, LoRA, tools and environments: TRL\'s weights, bit for bit'
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="defaults"),
        *(pytest.param(each, id=name, marks=pytest.mark.slow) for name, each in BY_DAY.items()),
        *(pytest.param(each, id=name, marks=pytest.mark.exhaustive) for name, each in BY_NIGHT.items()),
    ],
)
def test_without_replay_training_is_trls_own_to_the_last_bit(options, folder, caplog):
    """Capture takes no random number and changes no score."""
    watched = require_same(folder, **options)
    assert logged(watched, "mismatch/k3")
    assert not [record for record in caplog.records if record.name.startswith("foreroute")]


class OwnLoss(trl.GRPOTrainer):
    """Computes its loss past the method that all log-probs go through, as a fused kernel would."""

    def _compute_loss(self, model, inputs):
        return sum(weight.square().mean() for weight in model.parameters())


def engaged(model):
    """Sequences of an engine without log-probs, for TRL's own turns behind a tool have none."""
    roll_out = tools_runs.branching(EmbeddedEngine(model))
    return lambda prompts, trainer: {**roll_out(prompts, trainer), "logprobs": None}


UNMEASURED = {
    "no-routes": ({"rollout_func": partial(Book, change=lambda routes: None)}, "no 'routed_experts' for 8 sequences"),
    "beams": ({"generation_kwargs": {"num_beams": 2}}, "num_beams is 2"),
    "own-loss": ({"cls": OwnLoss, "num_iterations": 1, "steps_per_generation": 2}, "computed a loss without"),
    "continuous-batching": (
        {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
        },
        "continuous_batching",
    ),
    "tools-and-rollout-func": (
        {"run": tools_runs.trained, "model": agent, "rollout_func": engaged},
        r"tools.*rollout_func",
    ),
}

if not hasattr(trl.GRPOConfig, "use_transformers_continuous_batching"):  # before TRL 1.7
    del UNMEASURED["continuous-batching"]


@pytest.mark.shows("TRL", "`num_beams` above 1", refused="beams change their places after they were routed")
@pytest.mark.shows(
    "TRL", '`replay="none"` where nothing can be recorded: continuous batching, beams, a `rollout_func` without routes'
)
@grid("reason", list(UNMEASURED), quick=1)
def test_where_nothing_can_be_recorded_training_is_trls_own_and_the_log_says_why(reason, folder, caplog):
    settings, message = UNMEASURED[reason]
    settings = {"max_steps": 1, **settings}
    watched = require_same(folder, **settings)
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("foreroute")]
    assert re.search(f"replay='none' measures no mismatch from here on, and trains as TRL does.*{message}", said)
    assert not any(name.startswith("mismatch/") for entry in watched.state.log_history for name in entry)
    with pytest.raises(ForerouteError, match=message):  # the control
        run_of(folder, **{"cls": trl.GRPOTrainer, **settings}, replay="R3")


@pytest.mark.shows("TRL", "LoRA, on experts too; `bf16`")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "most_k3"), [({"peft_config": LORA}, 1e-9), ({"bf16": True}, 1e-2)], ids=["lora", "autocast"]
)
def test_trls_own_sampling_is_captured(settings, most_k3, folder):
    """Log-probs of the rollout are those at the temperature and of the whole distribution, as the trainer's are."""
    trainer = trained(folder, max_steps=1, **settings)
    assert logged(trainer, "mismatch/disagreement") == [0.0]
    assert logged(trainer, "mismatch/k3")[0] < most_k3


@pytest.mark.slow
def test_evaluation_is_untouched(folder):
    results = []
    for way in ({"cls": trl.GRPOTrainer}, {"replay": "R3"}):
        trainer = make(folder, eval_strategy="no", per_device_eval_batch_size=2, **way)
        torch.manual_seed(3)
        metrics = trainer.evaluate()
        results.append({name: value for name, value in metrics.items() if not name.endswith(TIMES)})
    assert results[0] == results[1]
    assert not any("mismatch" in name for name in results[1])
