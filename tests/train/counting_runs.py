"""Runs of a trainer that only counts: everything around the steps is real, and a run takes no time."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foreroute.capture import Generation
from foreroute.mismatch import alarm_rules
from foreroute.train import run
from foreroute.train.ranks import Ranks
from tests.traces import random_trace
from tests.train.small_runs import small_config

TRACE = random_trace(0)
GENERATION = Generation(TRACE, np.ones(len(TRACE), np.int64), np.zeros(TRACE.num_rows - len(TRACE), np.float32))


class CountingTrainer:
    """What it has learned depends on all data that it was given, in order, and on whose routes it trained with."""

    def __init__(self, config, worthless):
        self.config, self.worthless = config, worthless
        self.execution = SimpleNamespace(ranks=Ranks())
        self.task, self.policy = SimpleNamespace(data_digest=""), SimpleNamespace(model=None)
        self.step = 0
        self.learned = torch.zeros(64, dtype=torch.float64)

    def run_step(self):
        share = 0.5 if self.config.rl.routing == "R3" else 0.25
        self.learned = self.learned * share + torch.from_numpy(np.random.default_rng(self.step).random(64))
        record = {
            "step": self.step,
            "reward_mean": 0.0 if self.step in self.worthless else 0.5,
            "entropy": float(self.learned.sum()),
        }
        self.step += 1
        return SimpleNamespace(generation=GENERATION), record

    def weights_for_engine(self):
        return {}

    def close(self):
        pass

    def state(self):
        return {"model": {"learned": self.learned}}

    def restore(self, state, name):
        self.step, self.learned = state["step"], state["model"]["learned"]


@contextmanager
def counting(worthless=()):
    """Runs count instead of training; what they are given at the steps `worthless` earns nothing."""
    policy = SimpleNamespace(spec=SimpleNamespace(num_experts=1), model=torch.nn.Identity())
    closed = SimpleNamespace(close=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_policy", lambda *_: policy)
        patch.setattr(run, "make_engine", lambda *_: closed)
        patch.setattr(run, "make_execution", lambda *_: closed)
        patch.setattr(run, "warm_start", lambda *_: True)
        patch.setattr(run, "write_model", lambda model, weights, task, folder: folder.mkdir(exist_ok=True))
        patch.setattr(run, "make_trainer", lambda config, *_: CountingTrainer(config, worthless))
        short_means(patch)
        yield


def short_means(patch):
    """Alarms of means of two steps, low twice: where steps 5, 6 and 7 are worthless, one goes off at step 7."""
    patch.setattr(alarm_rules, "WINDOW", 2)
    patch.setattr(alarm_rules, "COLLAPSE_FOR", 2)


def counting_config(**sections):
    return small_config(rl={"steps": 9, "routing": "none"}, **sections)
