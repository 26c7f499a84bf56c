"""Replay that would be wrong, or would not happen, ends in one clear error."""

from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import trl
from peft import PromptTuningConfig

from examples.trl.tiny import look_up, policy
from foreroute.costs import hardware_preset
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import AttachError, BatchMismatchError, CaptureError, ConfigError, ReplayError, StaleTraceError
from foreroute.trainers.trl import GRPOTrainer, RoutingReplay, rollout_with
from foreroute.trainers.trl.rollout import ROWS
from foreroute.trainers.trl.settings import require_supported
from tests.tiers import grid
from tests.trainers.trl.routes_book import Book
from tests.trainers.trl.trl_runs import make

TOPOLOGY = hardware_preset("h100").topology(num_ranks=2, redundant_slots=2)
PROMPT_TUNING = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
NO_OLD_PASS = {"num_iterations": 1, "steps_per_generation": 2}


class OwnStep(GRPOTrainer):
    """A loss of its own, past everything."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return next(model.parameters()).sum() * 0


def bringing(change):
    """A trainer whose micro-batches have other numbers of sequences, as carrying routes beside TRL's batch would."""

    class Changed(GRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            inputs = dict(super()._prepare_inputs(generation_batch))
            rows = change(inputs.pop(ROWS))
            return inputs if rows is None else inputs | {ROWS: rows}

    return Changed


def returned(change):
    """A `rollout_func` whose routes are changed before they are returned."""
    return lambda model: Book(model, change=change)


def running(change):
    """A trainer whose passes over a batch run other forwards than those of its slices."""

    class Changed(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **options):
            run, is_pass = self.routing.run_pass, self.routing._now is not None
            changed = lambda compute, *args: run(partial(change, compute) if is_pass else compute, *args)  # noqa: E731
            with patch.object(self.routing, "run_pass", changed):
                return super()._get_per_token_logps_and_entropies(*args, **options)

    return Changed


def first_two(compute):
    model, ids, mask, *others = compute.args
    return compute.func(model, ids[:2], mask[:2], *others, **compute.keywords)


def stale(model):
    """Samples by an engine that never takes over new weights."""
    engine = EmbeddedEngine(model)
    engine.weight_version, engine.load_weights = 7, lambda *_: None
    return rollout_with(engine)


def sampled(model):
    return rollout_with(EmbeddedEngine(model))


REFUSED = {
    # settings; under "source", what gives a rollout_func of the model
    "prompt tuning": ({"peft_config": PROMPT_TUNING}, ConfigError, "prompt and prefix tuning"),
    "not spread": ({"topology": TOPOLOGY}, AttachError, 'ep_implementation="foreroute'),
    "no old pass to stop in": ({"sentinel": "stop", **NO_OLD_PASS}, ReplayError, r"sentinel='stop'.*log-probs"),
    "no old pass": ({"replay": "R2", **NO_OLD_PASS}, ReplayError, r"nothing.*replay"),
    "own step": ({"kind": OwnStep}, ReplayError, "a training step without"),
    "no numbers": ({"kind": bringing(lambda rows: None)}, ReplayError, "foreroute_rows"),
    "other sequence": ({"kind": bringing(lambda rows: rows.flip(0))}, BatchMismatchError, r"the sequences \[1, 0\] of"),
    "rollout before": ({"kind": bringing(lambda rows: rows - torch.tensor([1, 0]))}, ReplayError, r"rollouts \[0\]"),
    "forwards left out": ({"kind": running(first_two)}, ReplayError, "1 forwards of a batch of 4 slices"),
    "forwards twice": ({"kind": running(lambda run: (run(), run()))}, ReplayError, "more forwards .* its 4 slices"),
    "late": ({"source": returned(lambda routes: [np.roll(each, 1, 0) for each in routes])}, ReplayError, "shift"),
    "zeros": ({"source": returned(lambda routes: list(map(np.zeros_like, routes)))}, CaptureError, "sequence 0"),
    "other weights": ({"source": stale}, StaleTraceError, r"versions \[7\].*rollout.*0"),
    "penalty": (
        {"source": sampled, "replay": "none", "repetition_penalty": 1.1},
        ConfigError,
        "repetition_penalty is",
    ),
}


@grid("name", REFUSED, quick=3)
def test_what_is_not_replayed_or_wrong_ends_the_run(name, folder):
    settings, error, message = REFUSED[name]
    settings, model = dict(settings), policy()
    if source := settings.pop("source", None):
        settings["rollout_func"] = source(model)
    with pytest.raises(error, match=message):
        make(folder, model=model, **settings).train()


def test_a_trainer_that_is_not_trls_and_a_release_without_a_hook_are_named(folder, monkeypatch):
    with pytest.raises(AttachError, match=r"derived.*trl\.GRPOTrainer"):
        type("Alone", (RoutingReplay,), {})()
    monkeypatch.delattr(trl.GRPOTrainer, "_compute_loss")
    with pytest.raises(AttachError, match=rf"trl {trl.__version__} has no GRPOTrainer\._compute_loss"):
        make(folder)


def processes(number, fsdp_version=2):
    plugin = SimpleNamespace(fsdp_version=fsdp_version)
    return SimpleNamespace(num_processes=number, state=SimpleNamespace(fsdp_plugin=plugin))


@pytest.mark.shows("TRL", "FSDP1", refused="`accelerate` runs it on GPUs alone, where nobody tested it")
@pytest.mark.shows(
    "TRL",
    "tools with a `rollout_func` of one's own, or with a vLLM that serves several processes",
    refused="TRL samples those turns, or deals them out, otherwise",
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accelerator": processes(1, fsdp_version=1)}, "fsdp_version: 2"),
        (
            {"accelerator": processes(2), "use_vllm": True, "vllm_mode": "server", "tools": [look_up]},
            "in equal shares",
        ),
    ],
)
def test_what_was_never_tested_is_refused(changes, message, folder, monkeypatch):
    """test_trl_same.py has tools with a `rollout_func`."""
    trainer = make(folder)
    monkeypatch.setattr(trainer, "accelerator", processes(1))
    require_supported(trainer, "R3")
    for setting, value in changes.items():
        monkeypatch.setattr(trainer, setting, value)
    with pytest.raises(ConfigError, match=message):
        require_supported(trainer, "R3")


OF_ANOTHER_SEQUENCE = bringing(lambda rows: torch.flip(rows, [0]))


def test_routes_of_other_tokens_are_not_compared_either_and_end_no_run(folder, caplog):
    trainer = make(folder, kind=OF_ANOTHER_SEQUENCE, replay="none", max_steps=1, **NO_OLD_PASS)
    trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("foreroute")]
    assert "2 forwards ran on other tokens than the routes of the rollout" in said
    assert not any(name.startswith("mismatch/") for entry in trainer.state.log_history for name in entry)
