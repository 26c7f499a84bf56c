"""What replay leaves alone is bit for bit TRL's own."""

import pytest
import torch
import trl
from peft import LoraConfig

from tests.trainers.trl.trl_runs import logged, make, trained

TIMES = ("time", "_per_second")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=EXPERTS, init_lora_weights=False)
KINDS = ("loss", "grad_norm", "reward", "entropy", "aux_loss", "clip_ratio/region_mean", "completions/mean_length")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """TRL's own, when it has trained."""
    return trained(str(tmp_path_factory.mktemp("plain")), kind=trl.GRPOTrainer)


def test_without_replay_training_is_trls_own_to_the_last_bit(folder, plain):
    """Capture takes no random number and changes no score."""
    watched = trained(folder, replay="none")
    for kind in KINDS:
        assert logged(plain, kind) == logged(watched, kind), kind
    for one, other in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_replay_of_the_policys_own_rollout_stays_close_to_trl(folder, plain):
    """Routes of `generate`, token by token over a cache, in float32: hardly a route differs, and so hardly a loss."""
    replayed = trained(folder)
    assert logged(replayed, "loss")[0] == pytest.approx(logged(plain, "loss")[0], abs=1e-4)
    assert max(logged(replayed, "mismatch/k3")) < 1e-9
    assert max(logged(replayed, "mismatch/f2")) == 0
    assert set(logged(replayed, "mismatch/disagreement")) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "most_k3"),
    [({"peft_config": LORA}, 1e-9), ({"bf16": True}, 1e-2)],
    ids=["lora", "autocast"],
)
def test_trls_own_sampling_is_captured(settings, most_k3, folder):
    """Log-probs of the rollout are those at the temperature and of the whole distribution, as the trainer's are."""
    trainer = trained(folder, max_steps=1, **settings)
    assert logged(trainer, "mismatch/disagreement") == [0.0]
    assert logged(trainer, "mismatch/k3")[0] < most_k3


@pytest.mark.slow
def test_evaluation_is_untouched(folder):
    results = []
    for kind in ({"kind": trl.GRPOTrainer}, {"replay": "R3"}):
        trainer = make(folder, eval_strategy="no", per_device_eval_batch_size=2, **kind)
        torch.manual_seed(3)
        metrics = trainer.evaluate()
        results.append({name: value for name, value in metrics.items() if not name.endswith(TIMES)})
    assert results[0] == results[1]
    assert not any("mismatch" in name for name in results[1])
