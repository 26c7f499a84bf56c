"""Rollouts sampled ahead: whose weights they are of, that it repeats, and what is too old."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.errors import ConfigError, DivergedError, RunFolderError, StaleTraceError
from foreroute.trace import NO_VERSION
from foreroute.train import Watcher, load_checkpoint, train
from foreroute.train.ranks import Ranks
from foreroute.train.schedule import make_schedule
from foreroute.train.stored_rollout import restored, stored
from small_runs import records, same_state, small_config, trainer_of
from spreading import scored_by_tokens

STEPS = 4


def config_of(max_staleness, **sections):
    rollout = {"precision": "fp8", "max_staleness": max_staleness}
    return small_config(rollout=rollout, warm_start={"max_steps": 2}, **{"rl": {"learning_rate": 5e-3}, **sections})


class Late:
    """An engine that is given the weights of every step, and takes those of the step before."""

    def __init__(self, engine):
        self.engine, self.given = engine, []

    def load_weights(self, weights, version):
        self.given.append({name: weight.clone() for name, weight in weights.items()})
        self.engine.load_weights(self.given[max(0, version - 1)], max(0, version - 1))

    def generate(self, *args):
        return self.engine.generate(*args)


def steps_of(trainer):
    with scored_by_tokens():
        taken = [trainer.run_step() for _ in range(STEPS)]
    seen = [{key: value for key, value in record.items() if key != "seconds"} for _, record in taken]
    state = trainer.state()
    trainer.close()
    return [experience.generation.trace for experience, _ in taken], seen, state


def test_rollouts_ahead_are_those_of_older_weights_one_after_another():
    traces, seen, state = steps_of(trainer_of(config_of(1)))
    by_hand = trainer_of(config_of(1))
    by_hand.close()
    by_hand.ahead, by_hand.engine = None, Late(by_hand.engine)
    expected_traces, expected, expected_state = steps_of(by_hand)
    assert [record["staleness"] for record in seen] == [0, 1, 1, 1]
    assert [trace.versions for trace in traces] == [(0,), (0,), (1,), (2,)]
    assert all(record["grad_norm"] > 0 for record in seen)
    assert all(ours.equals(theirs) for ours, theirs in zip(traces, expected_traces, strict=True))
    assert seen == expected
    del state["rollouts"]
    assert same_state(state, expected_state)
    # a control: with weights of the same step it is another run
    fresh_traces, _, fresh_state = steps_of(trainer_of(config_of(0)))
    assert fresh_traces[0].equals(traces[0])
    assert not same_state(state["model"], fresh_state["model"])
    assert not np.array_equal(fresh_traces[-1].token_ids_N, traces[-1].token_ids_N)


def test_a_run_with_rollouts_waiting_is_resumed_to_the_bit(tmp_path):
    config, seen = config_of(2, rl={"steps": STEPS, "routing": "R3+weights"}), []
    with scored_by_tokens():
        whole = train(config, tmp_path / "whole")
        train(config, tmp_path / "stopped", watcher=Watcher(on_step=seen.append, should_stop=lambda: len(seen) == 1))
        resumed = train(config, tmp_path / "stopped", resume=True)
    assert records(resumed.path) == records(whole.path)
    assert [record["staleness"] for record in records(whole.path)] == [0, 1, 2, 2]
    last = load_checkpoint(whole.last_checkpoint())
    assert list(last["rollouts"]) == [4, 5]
    assert same_state(load_checkpoint(resumed.last_checkpoint()), last)
    del last["rollouts"]
    torch.save(last, whole.last_checkpoint())
    with pytest.raises(RunFolderError, match="does not fit this model and optimizer: 'rollouts'"):
        train(config.model_copy(update={"rl": config.rl.model_copy(update={"steps": 5})}), whole.path, resume=True)


def test_a_rollout_is_stored_whole():
    trainer = trainer_of(small_config(rl={"routing": "R3+weights"}))
    experience, file = trainer._roll_out(), io.BytesIO()
    torch.save(stored(experience), file)
    file.seek(0)
    again = restored(torch.load(file, weights_only=True), trainer.policy.spec)
    assert again.generation.trace.equals(experience.generation.trace)
    assert np.array_equal(again.generation.trace.gate_weights_NLK, experience.generation.trace.gate_weights_NLK)
    assert again.generation.trace.provenance == experience.generation.trace.provenance
    for holder, other in ((again, experience), (again.generation, experience.generation)):
        arrays = {name: value for name, value in vars(holder).items() if isinstance(value, np.ndarray)}
        assert arrays
        assert all(np.array_equal(value, getattr(other, name)) for name, value in arrays.items())
    assert again.max_response_tokens == experience.max_response_tokens
    assert again.sampled.responses == experience.sampled.responses


def test_older_routes_than_asked_for_are_refused():
    trainer = trainer_of(config_of(1))
    trainer.close()
    experience = trainer._sample(0, 0, trainer.execution.state_dict())
    schedule = make_schedule(experience, trainer.config.rl, Ranks(), seed=(0, 0))
    trainer.step = 1
    trainer._recompute(experience, schedule, "replayed")
    trainer.step = 2
    with pytest.raises(StaleTraceError, match=r"weight versions \[0\], expected only 1, 2 "):
        trainer._recompute(experience, schedule, "replayed")
    recomputed = trainer._recompute(experience, schedule, "native")
    with pytest.raises(StaleTraceError, match=r"weight versions \[0\], expected only 1, 2 "):
        trainer._update(experience, schedule, recomputed, None)
    part = experience.generation.trace
    with pytest.raises(StaleTraceError, match="expected only 1 "), trainer.policy.replay(part, weight_version=1):
        pass
    # rows of several versions, as a rollout has that took over new weights on its way
    versions_N = np.where(part.valid_N, np.where(np.arange(part.num_rows) % 2, 1, 3), NO_VERSION).astype(np.int32)
    mixed = replace(part, weight_versions_N=versions_N)
    with pytest.raises(StaleTraceError, match=r"versions \[1, 3\], expected only 2, 3"):
        trainer.policy.replay(mixed, weight_version=range(2, 4)).__enter__()


def test_what_goes_wrong_ahead_is_raised_and_the_thread_ends(monkeypatch):
    trainer = trainer_of(config_of(1))
    with scored_by_tokens():
        trainer.run_step()

    def fail(*_):
        raise DivergedError("not finite")

    monkeypatch.setattr(trainer.engine, "generate", fail)
    with scored_by_tokens():
        trainer.run_step()  # its rollout was sampled before
        with pytest.raises(DivergedError, match="not finite"):
            trainer.run_step()
    trainer.close()
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness trains in one process"):
        small_config(rollout={"prompts": 8, "max_staleness": 1}, parallel={"expert": 2})
