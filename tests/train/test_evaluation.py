"""Evaluation in runs on the built-in task: figures that repeat, and a run that does not notice."""

import json

import numpy as np

from foreroute.train import train
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import roll_out
from foreroute.train.tasks.chain import ChainTask
from tests.train.small_runs import records, small_config, trainer_of


def test_evaluating_changes_nothing(tmp_path, monkeypatch):
    asked, held_out = [], ChainTask.held_out
    monkeypatch.setattr(ChainTask, "held_out", lambda *given: asked.append(held_out(*given)) or asked[-1])
    evaluation = {"every": 2, "prompts": 5, "group_size": 3, "temperature": 0.7}
    with_it = train(small_config(evaluation=evaluation, rl={"steps": 3}), tmp_path / "with")
    without = train(small_config(rl={"steps": 3}), tmp_path / "without")
    seen = records(with_it.path)
    figures = [record.pop("evaluation", None) for record in seen]
    assert seen == records(without.path)
    assert figures[1] is None
    first, third = ([problem.prompt for problem in problems] for problems in asked)
    assert first == third, "the same problems each time"
    for each in (figures[0], figures[2]):
        assert each["responses"] == 15
        assert 0 <= each["reward_mean"] <= 1
    assert json.loads((with_it.path / "config.json").read_text())["evaluation"]["every"] == 2


def test_held_out_problems_are_the_same_each_time_and_no_step_has_them():
    trainer = trainer_of(small_config(task={"min_operands": 8, "max_operands": 8}))
    held_out = [problem.prompt for problem in trainer.task.held_out(64, np.random.default_rng([0, 0, 3]))]
    assert len(set(held_out)) == 64
    for step in range(2):
        generation = roll_out(trainer.engine, trainer.task, trainer.config, step, Ranks()).generation
        sampled = {trainer.task.text(generation.trace.tokens(s)[:16]) for s in range(len(generation))}
        assert not sampled & set(held_out)
