"""The sentinel in the trainer: an engine freezes in the middle of a run, and the run is told of it, or stopped."""

import copy
from dataclasses import replace

import pytest

from foreroute.errors import BatchMismatchError
from foreroute.mismatch.sentinel import WARM_UP
from foreroute.train.chain import ChainTask
from tests.train.small_runs import SIZES, random_rewards, same_state, small_config, trainer_of

FROZEN, SINCE = 3, 12
"""The sequence that freezes, and the position."""


def freeze(generation):
    trace = generation.trace
    ids_NLK, start, stop = trace.expert_ids_NLK.copy(), *trace.offsets[FROZEN : FROZEN + 2]
    ids_NLK[start + SINCE : stop] = ids_NLK[start + SINCE]
    return replace(generation, trace=replace(trace, expert_ids_NLK=ids_NLK))


def trainer_that(watching):
    task = {"min_operands": 24, "max_operands": 24}
    model = {"sizes": {**SIZES, "num_hidden_layers": 1}}
    return trainer_of(small_config(task=task, model=model, rl={"sentinel": watching, "micro_step_tokens": 512}))


def test_an_engine_that_freezes_is_told_or_ends_the_run_before_its_weights_change(monkeypatch):
    """In a run that was resumed: a checkpoint has the past of the sentinel."""
    monkeypatch.setattr(ChainTask, "rewards", random_rewards())
    trainer = trainer_that("warn")
    history = [trainer.run_step()[1] for _ in range(WARM_UP + 1)]
    assert not any(record.suspicions for record in history)
    before = copy.deepcopy(trainer.state())
    for watching in ("warn", "stop"):
        trainer = trainer_that(watching)
        trainer.restore(copy.deepcopy(before))
        generate = trainer.engine.generate
        trainer.engine.generate = lambda *args, generate=generate: freeze(generate(*args))
        if watching == "stop":
            with pytest.raises(BatchMismatchError, match=rf"step {WARM_UP + 1}: sequence {FROZEN}, "):
                trainer.run_step()
            assert same_state(before["model"], trainer.state()["model"])
        else:
            _, record = trainer.run_step()
            assert [each.sequence for each in record.suspicions] == [FROZEN]
            assert not same_state(before["model"], trainer.state()["model"])
