"""Rollouts by top-p, top-k and min-p: the trainer scores tokens on the sets that they were drawn from."""

from dataclasses import replace

import numpy as np

from foreroute.train import train
from foreroute.train.chain import ChainTask
from foreroute.train.loop import make_schedule
from foreroute.train.policy import Alone
from tests.train.small_runs import always_informative, records, small_config, trainer_of

TEMPERATURE = 0.8


def config_of(cut, **sections):
    settings = {"prompts": 8, "precision": "float32", "temperature": TEMPERATURE, **cut}
    return small_config(rollout=settings, warm_start={"max_steps": 4}, **sections)


def recomputed(trainer, experience):
    recompute, _ = make_schedule(experience, trainer.config.rl, Alone(), seed=(0, 0))
    return trainer.recompute(experience.generation, recompute, "replayed")


def without_masks(experience):
    generation = experience.generation
    whole = replace(generation, trace=generation.trace.without_streams())
    return replace(experience, generation=whole)


def test_ratios_are_one_on_the_recorded_sets_and_the_kept_mass_without(monkeypatch):
    monkeypatch.setattr(ChainTask, "rewards", always_informative)
    trainer = trainer_of(config_of({"top_p": 0.9, "top_k": 8, "min_p": 0.01}))
    experience = trainer.roll_out()
    engine = experience.generation.logprobs_R.astype(np.float64)
    on_sets = recomputed(trainer, experience)
    log_r = on_sets.logprobs_R - engine
    assert np.mean(np.expm1(log_r) - log_r) < 1e-9
    assert recomputed(trainer, without_masks(experience)).logprobs_R.mean() < on_sets.logprobs_R.mean() - 0.01


def test_a_run_trains_on_them(tmp_path, monkeypatch):
    monkeypatch.setattr(ChainTask, "rewards", always_informative)
    train(config_of({"top_p": 0.7}, rl={"steps": 3, "routing": "R3", "mini_steps": 2}), tmp_path / "run")
    for record in records(tmp_path / "run"):
        assert record["grad_norm"] > 0
        assert all(part["k3"] < 1e-9 for part in record["mismatch"].values())
        assert record["mismatch"]["native"]["differing_share"] == 0, "in float32 trainer and engine route alike"
