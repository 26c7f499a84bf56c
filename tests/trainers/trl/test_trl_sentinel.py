"""The sentinel in TRL: a rollout that is mixed up on the way, and what each policy does about it."""

import copy
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import BatchMismatchError, EngineError
from foreroute.mismatch import LooksLike, Sentinel, Suspicion
from foreroute.trainers.trl import rollout_with
from foreroute.trainers.trl.controller import TrainerPassController
from tests.tiers import grid
from tests.trainers.trl.trl_runs import logged, make, policy

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
    return make(
        folder, model=(model := policy()), rollout_func=rollout_with(EmbeddedEngine(model, "float32")), **settings
    )


@grid("passes", [TWICE, ONCE], ids=["old pass", "no old pass"], quick=0)
def test_a_rollout_that_is_mixed_up_is_in_the_log_of_its_step(passes, folder, mixed_up, caplog):
    run = trainer(folder, **passes)
    with caplog.at_level(logging.WARNING):
        run.train()
    seen = logged(run, "sentinel/suspicions")
    assert seen[0] == 0
    assert sum(seen) == 1
    [line] = [record.message for record in caplog.records if record.message.startswith("The sentinel:")]
    assert "pick other experts" in line


@pytest.mark.slow
def test_a_run_that_is_to_stop_does_before_it_learns_from_the_rollout(folder, mixed_up):
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


@pytest.mark.slow
def test_weights_that_a_sync_garbled_stop_the_run(folder, monkeypatch):
    generate = EmbeddedEngine.generate

    def garbled(engine, *args):
        with torch.no_grad():
            engine._model.lm_head.weight.copy_(40 * engine._model.lm_head.weight.roll(1, 0))
        return generate(engine, *args)

    monkeypatch.setattr(EmbeddedEngine, "generate", garbled)
    with pytest.raises(EngineError, match=r"Weights.*arrive"):
        trainer(folder, sentinel="stop", **TWICE).train()
