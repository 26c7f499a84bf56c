"""Rollouts sampled ahead: whose weights they are of, that it repeats, and what is too old."""

from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from foreroute.errors import ConfigError, DivergedError, RunFolderError, StaleTraceError
from foreroute.trace import NO_VERSION
from foreroute.trace.streams import same_streams
from foreroute.train import Watcher, load_checkpoint, train
from foreroute.train.async_rollout import restored, stored
from foreroute.train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from foreroute.train.passes import make_schedule
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import evaluate, evaluation_record
from tests.train.expert_parallel_steps import scored_by_tokens
from tests.train.small_runs import records, same_state, small_config, trainer_of

STEPS = 4


def config_of(max_staleness, **sections):
    rollout = {"precision": "fp8", "max_staleness": max_staleness, **sections.pop("rollout", {})}
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
    """And evaluations between them have the weights of their step, and change nothing."""
    evaluation = {"every": 2, "prompts": 3, "group_size": 2, "temperature": 1.0}
    traces, seen, state = steps_of(trainer_of(config_of(1, evaluation=evaluation)))
    evaluated = [record.pop("evaluation", None) for record in seen]
    by_hand = trainer_of(config_of(1))
    by_hand.close()
    by_hand.async_rollouts, by_hand.engine = None, Late(by_hand.engine)
    expected_traces, expected, expected_state = steps_of(by_hand)
    assert [record["staleness"] for record in seen] == [0, 1, 1, 1]
    assert [trace.versions for trace in traces] == [(0,), (0,), (1,), (2,)]
    assert all(record["grad_norm"] > 0 for record in seen)
    engine, config = by_hand.engine, config_of(1, evaluation=evaluation)
    engine.engine.load_weights(engine.given[2], 2)
    with scored_by_tokens():
        figures = evaluation_record([evaluate(engine.engine, by_hand.task, config, 2, Ranks())])["evaluation"]
    assert evaluated[1::2] == [None, None]
    assert evaluated[2] == figures != evaluated[0]
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
    checkpoint = read_checkpoint(whole.last_checkpoint())
    write_checkpoint(whole.last_checkpoint(), replace(checkpoint, state=last))
    with pytest.raises(RunFolderError, match="does not fit this model and optimizer: 'rollouts'"):
        train(config.model_copy(update={"rl": config.rl.model_copy(update={"steps": 5})}), whole.path, resume=True)


def test_a_rollout_is_stored_whole(tmp_path):
    trainer = trainer_of(small_config(rl={"routing": "R3+weights"}))
    experience, path = with_a_tool_and_a_failure(trainer._roll_out()), tmp_path / "state"
    write_checkpoint(path, Checkpoint({"step": 0, "model": {}, "rollout": stored(experience)}, "", ""))
    again = restored(load_checkpoint(path)["rollout"], trainer.policy.spec)
    assert again.generation.trace.equals(experience.generation.trace)
    assert again.generation.trace.gate_weights_NLK is not None
    assert same_fields(again, experience) > 15


def with_a_tool_and_a_failure(experience):
    """As if a tool had said the second token of the longest response."""
    generation = experience.generation
    longest = int(generation.response_lengths.argmax())
    sampled_N = generation.sampled_N.copy()
    said = int(generation.trace.offsets[longest] + generation.prompt_lengths[longest]) + 1
    sampled_N[said] = False
    logprobs_R = generation.logprobs_R[sampled_N[generation.sampled_N]]
    return replace(
        experience,
        generation=replace(generation, sampled_N=sampled_N, logprobs_R=logprobs_R),
        sampled=replace(experience.sampled, failures=("no reward",)),
    )


def same_fields(one, other):
    """How many fields two dataclasses have, all of which must be the same."""
    count = 0
    for field in fields(one):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(ours):
            count += same_fields(ours, theirs)
        elif field.name == "streams":
            assert same_streams(ours, theirs)
        elif isinstance(ours, np.ndarray):
            assert np.array_equal(ours, theirs), field.name
            assert ours.dtype == theirs.dtype, field.name
        else:
            assert ours == theirs, field.name
        count += 1
    return count


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
