"""Replay that would be wrong, or would not happen, ends in one clear error, and the sentinel sees what is mixed up."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trl
from peft import PromptTuningConfig

from examples.trl.tiny import look_up, policy
from foreroute.costs import hardware_preset
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import (
    AttachError,
    BatchMismatchError,
    CaptureError,
    ConfigError,
    EngineError,
    ReplayError,
    StaleTraceError,
)
from foreroute.mismatch import LooksLike, Sentinel, Suspicion
from foreroute.trainers.trl import GRPOTrainer, RoutingReplay, rollout_with
from foreroute.trainers.trl.controller import TrainerPassController
from foreroute.trainers.trl.rollout import ROWS
from foreroute.trainers.trl.settings import require_supported
from tests.tiers import grid
from tests.trainers.trl.routes_book import Book
from tests.trainers.trl.trl_runs import logged, make

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


def running(*parts):
    """A trainer whose passes over a batch run these parts of it, one after the other."""

    class Changed(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, ids, mask, *others, **options):
            run, is_pass = super()._get_per_token_logps_and_entropies, self.routing._now is not None
            for part in parts if is_pass else [slice(None)]:
                result = run(model, ids[part], mask[part], *others, **options)
            return result

    return type("Replaying", (RoutingReplay, Changed), {})


def stale(model):
    """Samples by an engine that never takes over new weights."""
    engine = EmbeddedEngine(model)
    engine.weight_version, engine.load_weights = 7, lambda *_: None
    return rollout_with(engine)


def garbled(model):
    """Samples by an engine whose weights a sync garbles."""
    engine = EmbeddedEngine(model, "float32")
    generate = engine.generate

    def of_other_weights(*args):
        head = engine._model.lm_head.weight.data
        head.copy_(40 * head.roll(1, 0))
        return generate(*args)

    engine.generate = of_other_weights
    return rollout_with(engine)


def sampled(model, *precision):
    return rollout_with(EmbeddedEngine(model, *precision))


REFUSED = {
    # settings; under "source", what gives a rollout_func of the model
    "prompt tuning": ({"peft_config": PROMPT_TUNING}, ConfigError, r"prompt.*prefix tuning"),
    "not spread": ({"topology": TOPOLOGY}, AttachError, 'ep_implementation="foreroute'),
    "plans of nothing": ({"plan": {"tolerance": 0}}, ConfigError, "plan.*topology"),
    "no old pass to stop in": ({"sentinel": "stop", **NO_OLD_PASS}, ReplayError, r"sentinel='stop'.*log-probs"),
    "no old pass": ({"replay": "R2", **NO_OLD_PASS}, ReplayError, r"nothing.*replay"),
    "own step": ({"cls": OwnStep}, ReplayError, r"training step.*without"),
    "no numbers": ({"cls": bringing(lambda rows: None)}, ReplayError, "foreroute_rows"),
    "other sequence": ({"cls": bringing(lambda rows: rows.flip(0))}, BatchMismatchError, r"the sequences \[1, 0\] of"),
    "rollout before": ({"cls": bringing(lambda rows: rows - torch.tensor([1, 0]))}, ReplayError, r"rollouts \[0\]"),
    "forwards left out": ({"cls": running(slice(2))}, ReplayError, "1 forwards of a batch of 4 slices"),
    "forwards twice": ({"cls": running(slice(None), slice(None))}, ReplayError, "more forwards .* its 4 slices"),
    "late": ({"source": returned(lambda routes: [np.roll(each, 1, 0) for each in routes])}, ReplayError, "shift"),
    "zeros": ({"source": returned(lambda routes: list(map(np.zeros_like, routes)))}, CaptureError, "sequence 0"),
    "garbled": ({"source": garbled, "sentinel": "stop", "num_iterations": 2}, EngineError, r"Weights.*arrive"),
    "other weights": ({"source": stale}, StaleTraceError, r"versions \[7\].*rollout.*0"),
    "penalty": ({"source": sampled, "replay": "none", "repetition_penalty": 1.1}, ConfigError, "repetition_penalty is"),
}


@grid("name", REFUSED, quick=2)
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
    with pytest.raises(AttachError, match=rf"trl {trl.__version__} .*GRPOTrainer\._compute_loss"):
        make(folder)


@pytest.mark.shows("TRL", "FSDP1", refused="`accelerate` runs it on GPUs alone, where nobody tested it")
@pytest.mark.shows(
    "TRL",
    "tools with a `rollout_func` of one's own, or with a vLLM that serves several processes",
    refused="TRL samples those turns, or deals them out, otherwise",
)
@pytest.mark.parametrize(
    ("number", "fsdp_version", "own", "message"),
    [
        (1, 1, {}, "fsdp_version: 2"),
        (2, 2, {"use_vllm": True, "vllm_mode": "server", "tools": [look_up]}, r"equal shares"),
    ],
)
def test_what_was_never_tested_is_refused(number, fsdp_version, own, message, folder):
    """test_trl_same.py has tools with a `rollout_func`."""
    trainer = make(folder)
    plugin = SimpleNamespace(fsdp_version=2)
    trainer.accelerator = SimpleNamespace(num_processes=1, state=SimpleNamespace(fsdp_plugin=plugin))
    require_supported(trainer, "R3")
    trainer.accelerator.num_processes, plugin.fsdp_version = number, fsdp_version
    vars(trainer).update(own)
    with pytest.raises(ConfigError, match=message):
        require_supported(trainer, "R3")


def test_routes_of_other_tokens_are_not_compared_either_and_end_no_run(folder, caplog):
    trainer = make(folder, cls=bringing(lambda rows: rows.flip(0)), replay="none", max_steps=1, **NO_OLD_PASS)
    trainer.train()
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("foreroute")]
    assert "2 forwards ran on other tokens than the routes of the rollout" in said
    assert not any(name.startswith("mismatch/") for entry in trainer.state.log_history for name in entry)


ONCE = {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
"""Each rollout serves one update, so that TRL has no old pass."""
TWICE = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
"""Each rollout serves two updates."""


@pytest.fixture
def mixed_up(monkeypatch):
    """Rows of every rollout but the first stand at other places."""
    take = TrainerPassController.take

    def spoilt(routing, rollout):
        if routing._num_rollouts:
            rows = np.flatnonzero(rollout.trace.valid_N)
            ids = rollout.trace.expert_ids_NLK.copy()
            ids[rows] = ids[np.random.default_rng(0).permutation(rows)]
            rollout.trace = replace(rollout.trace, expert_ids_NLK=ids)
        take(routing, rollout)

    monkeypatch.setattr(TrainerPassController, "take", spoilt)


def trainer(folder, **settings):
    model = policy()
    return make(folder, model=model, rollout_func=sampled(model, "float32"), **settings)


@pytest.mark.slow
def test_a_rollout_that_is_mixed_up_is_in_the_log_of_its_step_or_ends_the_run_before_it(folder, mixed_up, caplog):
    caplog.set_level("WARNING")
    for passes in (TWICE, ONCE):  # with an old pass and without
        caplog.clear()
        run = trainer(folder, **passes)
        run.train()
        seen = logged(run, "sentinel/suspicions")
        assert (seen[0], sum(seen)) == (0, 1)
        [line] = [record.message for record in caplog.records if record.message.startswith("The sentinel:")]
        assert "pick other experts" in line
    run = trainer(folder, sentinel="stop", **TWICE)
    with pytest.raises(BatchMismatchError, match=r"rollout 2 .*wrong"):
        run.train()
    assert run.state.global_step == 2  # those of the first rollout


def test_dropped_tokens_are_those_behind_the_first_wrong_row(folder, monkeypatch, caplog):
    def judge(sentinel, counts):
        since = int(counts.lengths_S[1]) - 4
        return [Suspicion(LooksLike.STALE_ROWS, "planted", 1.0, 0.1, 1e-9, sequence=1, since=since, num_rows=3)]

    monkeypatch.setattr(Sentinel, "judge", judge)
    run = trainer(folder, sentinel="drop", **TWICE | {"max_steps": 1})
    outputs, end = [], run.routing.end_generation
    run.routing.end_generation = lambda old, output: (end(old, output), outputs.append(copy.copy(output)))
    run.train()
    [output] = outputs
    assert "tokens of 1 sequences leave the loss" in caplog.text
    completions, prompts = output["completion_mask"].sum(1), output["prompt_mask"].sum(1)
    since = int(prompts[1] + completions[1]) - 4
    dropped = (output["completion_mask"] * (1 - output["tool_mask"])).bool()
    assert dropped.any(1).nonzero().flatten().tolist() == [1]
    positions = prompts[1] + torch.nonzero(dropped[1]).flatten()
    assert positions.tolist() == list(range(since + 1, since + 4))
