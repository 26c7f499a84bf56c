"""Runs of a trainer that only counts: everything around the steps is real, and a run takes no time."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foreroute.capture import Generation
from foreroute.records import StepRecord
from foreroute.train import run
from foreroute.train.policy import Alone
from tests.traces import random_trace
from tests.train.small_runs import small_config

TRACE = random_trace(0)
GENERATION = Generation(TRACE, np.ones(len(TRACE), np.int64), np.zeros(TRACE.num_rows - len(TRACE), np.float32))


class CountingTrainer:
    """What it has learned depends on all data that it was given, in order, and on whose routes it trained with."""

    def __init__(self, config):
        self.config = config
        self.execution = SimpleNamespace(ranks=Alone())
        self.task, self.policy = (
            SimpleNamespace(data_digest="", save_tokenizer=lambda folder: None),
            SimpleNamespace(model=None, gather_weights=dict[str, torch.Tensor]().items),
        )
        self.step = 0
        self.learned = torch.zeros(64, dtype=torch.float64)

    def run_step(self):
        share = 0.5 if self.config.rl.routing == "R3" else 0.25
        self.learned = self.learned * share + torch.from_numpy(np.random.default_rng(self.step).random(64))
        record = StepRecord(step=self.step, reward_mean=0.5, entropy=float(self.learned.sum()))
        self.step += 1
        return SimpleNamespace(generation=GENERATION), record

    def state(self):
        return {"step": self.step, "model": {"learned": self.learned}, "optimizer": {"state": {}}}

    def restore(self, state):
        self.step, self.learned = state["step"], state["model"]["learned"]


@contextmanager
def counting():
    policy = SimpleNamespace(spec=SimpleNamespace(num_experts=1), model=torch.nn.Identity())
    closed = SimpleNamespace(close=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_policy", lambda *_: policy)
        patch.setattr(run, "make_engine", lambda *_: closed)
        patch.setattr(run, "make_execution", lambda *_: closed)
        patch.setattr(run, "warm_start", lambda *_: True)
        patch.setattr(run, "ModelWriter", lambda model: SimpleNamespace(write=lambda folder, weights: folder.mkdir()))
        patch.setattr(run, "make_trainer", lambda config, *_: CountingTrainer(config))
        yield


def counting_config(steps=9, **sections):
    return small_config(rl={"steps": steps, "routing": "none"}, **sections)
