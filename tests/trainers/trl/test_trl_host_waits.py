"""Where the host waits for the device in a training step of TRL, on a device that counts: TRL alone against R3.

Numbers that TRL reads for its own metrics are not ours; the difference is.
"""

from collections import Counter
from unittest.mock import patch

import accelerate
import pytest
import torch
import trl
from transformers import TrainerCallback

from examples.trl.tiny import policy
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trainers.trl import GRPOTrainer, rollout_with
from tests.adapters.hf.test_host_waits import found_on_the_host
from tests.trainers.trl.routes_book import Drawn
from tests.trainers.trl.trl_runs import logged, make

TENSOR = torch.tensor


def tensor(data, *, device=None, **options):
    """As `torch.tensor`, which puts no values on this device."""
    made = TENSOR(data, **options)
    return made if device is None else made.to(device, non_blocking=True)


def run(folder, cls=GRPOTrainer, **settings):
    """Waits from the first forward of each optimizer step to it, and those of each pass without gradients."""
    waits = {"step": [], "pass": []}
    with other_device(generators=DEVICE) as device:

        class Watched(cls):
            is_in_step = False

            def _get_per_token_logps_and_entropies(self, *args, **options):
                before = Counter(device.reads)
                if torch.is_grad_enabled() and not self.is_in_step:
                    self.is_in_step = True
                    device.reads.clear()
                result = super()._get_per_token_logps_and_entropies(*args, **options)
                if not torch.is_grad_enabled():
                    waits["pass"].append(device.reads - before)
                return result

        class Watch(TrainerCallback):
            def on_pre_optimizer_step(self, *_, **__):
                waits["step"].append(Counter(device.reads))
                trainer.is_in_step = False

        on_device = patch.object(accelerate.Accelerator, "device", DEVICE)
        with on_device, patch.object(torch, "tensor", tensor):
            two = {"max_steps": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
            settings = {"rollout_func": Drawn(0), "optim": "sgd", **two, **settings}
            trainer = make(folder, cls=Watched, **settings)
            trainer.model.to(DEVICE)
            trainer.add_callback(Watch())
            with patch.object(trl.GRPOConfig, "device", DEVICE):
                trainer.train()
    return waits, trainer


@pytest.mark.slow
def test_no_update_waits_and_an_old_pass_reads_its_mask_alone(tmp_path):
    """Rollouts are of an engine that leaves tokens out, so that passes are scored on sampling masks."""
    settings = {"num_iterations": 2, "top_p": 0.8}
    (theirs, _), (ours, trainer) = (
        run(str(tmp_path), cls, rollout_func=rollout_with(EmbeddedEngine(policy(), "float32")).__call__, **settings)
        for cls in (trl.GRPOTrainer, GRPOTrainer)
    )
    assert ours["step"] == theirs["step"]
    assert min(sum(each.values()) for each in theirs["step"]) > 25, "TRL's own, of two micro-batches"
    _, *old = ours["pass"]  # behind the check of the first rollout
    assert old == [each + Counter({"to the host": 1}) for each in theirs["pass"]]
    assert set(logged(trainer, "mismatch/disagreement")) == {0.0}
    assert logged(trainer, "mismatch/native_disagreement")


@pytest.mark.slow
def test_rows_found_on_the_host_are_seen_to_wait(folder):
    """The control."""
    with patch.object(TraceRows, "_locate", found_on_the_host):
        waits, _ = run(folder, max_steps=1)
    assert min(waits["step"][0]["to the host"], waits["pass"][1]["to the host"] - 1) >= 4
