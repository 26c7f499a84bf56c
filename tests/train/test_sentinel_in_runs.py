"""The sentinel in the trainer: an engine freezes in the middle of a run, and each policy does what it says."""

import copy
import math
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import pytest

from foreroute.errors import BatchMismatchError
from foreroute.mismatch import LooksLike, Sentinel, Suspicion
from foreroute.mismatch.sentinel import WARM_UP
from foreroute.train.chain import ChainTask
from foreroute.train.loop import make_schedule
from tests.train.small_runs import SIZES, random_rewards, same_state, small_config, trainer_of

FROZEN, SINCE = 3, 12
"""The sequence that freezes, and the position."""


pytestmark = pytest.mark.usefixtures("rewards_that_differ")


def freeze(generation):
    trace = generation.trace
    ids_NLK, start, stop = trace.expert_ids_NLK.copy(), *trace.offsets[FROZEN : FROZEN + 2]
    ids_NLK[start + SINCE : stop] = ids_NLK[start + SINCE]
    return replace(generation, trace=replace(trace, expert_ids_NLK=ids_NLK))


def trainer_that(watching):
    task = {"min_operands": 24, "max_operands": 24}
    model = {"sizes": {**SIZES, "num_hidden_layers": 1}}
    return trainer_of(small_config(task=task, model=model, rl={"sentinel": watching, "micro_step_tokens": 512}))


@cache
def begun():
    """The state of a run after its warm-up, of its sentinel too, and its records."""
    trainer = trainer_that("warn")
    history = [trainer.run_step()[1] for _ in range(WARM_UP + 1)]
    return trainer.state(), history


def before_it_freezes(watching, spoil=freeze):
    """A trainer of the run that has begun, whose engine freezes in the next step, or spoils else."""
    trainer = trainer_that(watching)
    trainer.restore(copy.deepcopy(begun()[0]))
    generate = trainer.engine.generate
    trainer.engine.generate = lambda *args: spoil(generate(*args))
    return trainer


def frozen_step(watching, spoil=freeze):
    """This trainer after the step, its rollout, and the records of all steps."""
    trainer = before_it_freezes(watching, spoil)
    with mock.patch.object(ChainTask, "rewards", random_rewards()):  # the same in every case
        experience, record = trainer.run_step()
    return trainer, experience, [*begun()[1], record]


def test_tokens_behind_the_first_wrong_row_are_not_trained_on():
    trainer, experience, history = frozen_step("drop")
    kept, whole, _ = frozen_step("warn")
    generation = experience.generation
    lengths, prompts = generation.response_lengths, generation.trace.lengths - generation.response_lengths
    # row SINCE + 1 is the first that repeats, and routed what the token behind it was drawn from
    expected = np.where(np.arange(len(lengths)) == FROZEN, np.maximum(SINCE + 2 - prompts, 0), lengths)
    assert experience.trained_S.tolist() == np.where(experience.informative_S, expected, 0).tolist()
    assert whole.trained_S.tolist() == np.where(experience.informative_S, lengths, 0).tolist()
    dropped = int(lengths[experience.informative_S].sum() - experience.trained_S.sum())
    assert history[-1].dropped_tokens == dropped > 0 == history[-2].dropped_tokens
    assert [each.sequence for each in history[-1].suspicions] == [FROZEN]
    assert math.isfinite(history[-1].loss)
    assert not same_state(trainer.state()["model"], kept.state()["model"])


@pytest.mark.parametrize("method", ["dapo", "gspo"])
def test_tokens_that_are_left_out_have_no_part_in_loss_and_gradients(method):
    """Old log-probs that are others there change nothing, and others before are seen to."""
    kept, weights, config = 3, [], small_config(rl={"method": method})
    experience = trainer_of(config).roll_out()
    generation, lengths = experience.generation, experience.generation.response_lengths
    experience = replace(experience, left_S=np.minimum(lengths, kept))
    place_R = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    assert (place_R >= kept).any()
    for noisy_R in (place_R < 0, place_R >= kept, place_R == kept - 1):
        trainer = trainer_of(config)
        _, mini_batches = make_schedule(experience, trainer.config.rl, trainer.execution.ranks, seed=(0, 0))
        trainer.update(experience, mini_batches, generation.logprobs_R - np.float32(0.1) * noisy_R, None)
        weights.append(trainer.state()["model"])
    assert same_state(weights[0], weights[1])
    assert not same_state(weights[0], weights[2])


@pytest.mark.parametrize("looks_like", [LooksLike.STALE_LAYER, LooksLike.OLDER_WEIGHTS])
def test_a_layer_or_a_batch_that_is_suspected_leaves_nothing_to_train_on(looks_like, monkeypatch):
    found = Suspicion(looks_like, "planted", 0.9, 0.1, 1e-9, layer=0 if "layer" in looks_like else None)
    begun()
    monkeypatch.setattr(Sentinel, "judge", lambda sentinel, counts: [found])
    trainer, experience, history = frozen_step("drop", lambda generation: generation)
    assert [each.looks_like for each in history[-1].suspicions] == [looks_like]
    assert experience.informative_S.any()
    assert not experience.trained_S.any()
    assert history[-1].loss == history[-1].grad_norm == 0
    # the momenta that the optimizer has of earlier steps move nothing
    assert same_state(trainer.state()["model"], begun()[0]["model"])


def test_a_run_is_stopped_before_its_weights_change():
    trainer = before_it_freezes("stop")
    with pytest.raises(BatchMismatchError, match=rf"step {WARM_UP + 1}: sequence {FROZEN}, "):
        trainer.run_step()
    assert same_state(begun()[0]["model"], trainer.state()["model"])
