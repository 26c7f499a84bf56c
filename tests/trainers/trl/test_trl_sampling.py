"""Sampling that comes past TRL's own arguments: what leaves tokens out is scored on sets, what moves log-probs refused.

The oracle is the sampler: `generate` notes the log-probs of the scores that it drew from, and a vLLM returns them.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as of

from examples.trl.tiny import policy
from foreroute.capture.sampling_masks import masks_of_steps
from foreroute.errors import ConfigError, RankError
from foreroute.trainers.trl.capture_generate import SampledTokens
from tests.tiers import grid
from tests.trainers.trl.test_trl_masks import SCORES_ON_SETS
from tests.trainers.trl.trl_runs import logged, make, trained
from tests.trainers.trl.vllm_fakes import COLOCATE, SERVER, colocated, served

PROMPT = torch.tensor([[3, 4, 3, 5, 3]] * 2)
LEFT_OUT = [
    of.TopKLogitsWarper(4),
    of.TypicalLogitsWarper(0.5),
    of.SuppressTokensLogitsProcessor([4, 5]),
    of.ForcedEOSTokenLogitsProcessor(6, torch.tensor([1])),
    of.LogitNormalization(),
]
MOVED = [
    of.RepetitionPenaltyLogitsProcessor(1.3),
    of.TemperatureLogitsWarper(0.99),
    of.SequenceBiasLogitsProcessor([[[7], 0.01]]),
]


def names_of(processors):
    return "+".join(type(each).__name__ for each in processors)


@pytest.mark.parametrize("others", [*([each] for each in [*LEFT_OUT, *MOVED]), LEFT_OUT], ids=names_of)
def test_processors_may_leave_tokens_out_and_not_change_the_distances_of_others(others):
    scores, sampled = 9 * torch.randn(2, 12, generator=torch.Generator().manual_seed(3)), SampledTokens(0.7)
    for each in (sampled.begin_step, of.TemperatureLogitsWarper(0.7), *others, sampled):
        scores = each(PROMPT, scores)
    assert bool(sampled.is_moved) == (others[0] in MOVED)


def test_scores_that_generate_moves_in_a_way_that_no_set_shows_are_refused(folder):
    model = policy()
    model.generation_config.repetition_penalty = 1.3  # as a checkpoint's file would
    trainer = make(folder, model=model, generation_kwargs={"repetition_penalty": None})
    with pytest.raises(ConfigError, match=r"^among RepetitionPenaltyLogitsProcessor, .*change scores.*penalty"):
        trainer.train()


def test_a_process_whose_scores_were_not_moved_fails_with_the_one_whose_were(folder, monkeypatch):
    trainer = make(folder)
    monkeypatch.setattr(trainer.routing, "_over_processes", lambda failed: failed + 1)
    with pytest.raises(RankError, match=r"refused .*another"):
        trainer.train()


def test_a_sequence_that_lost_no_token_in_a_step_keeps_no_set_and_counts_as_drawn_from_all():
    sampled = SampledTokens(1.0)
    sampled.masks = True
    for lost in ([], [0], []):
        scores = sampled.begin_step(PROMPT, torch.zeros(2, 12)).clone()
        scores[lost, 4:] = -torch.inf
        sampled(PROMPT, scores)
    assert [len(ids) for _, ids in sampled.kept] == [0, 4, 0]
    masks = masks_of_steps(sampled.kept, 12, np.array([2, 3]), np.array([3, 2]))
    assert masks.valid_N.tolist() == [False, True, True, True, False, False, False, True, True, False]
    assert np.diff(masks.offsets).tolist() == [0, 0, 4, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.shows(
    "TRL", "`repetition_penalty` and other processors under R3", refused="no set of tokens shows what they change"
)
@grid(
    ("mode", "settings", "message"),
    [
        ({}, {"top_p": 0.8, "generation_kwargs": {"repetition_penalty": 1.3}}, "repetition_penalty = 1.3 changes"),
        (COLOCATE, {"generation_kwargs": {"temperature": 0}}, "sampled at temperature 0, and TRL scores at 1.0"),
        (COLOCATE, {"generation_kwargs": {"top_p": 0.5}}, "top_p = 0.5 leave tokens out, and vLLM .* a top_k alone"),
        (COLOCATE, {"generation_kwargs": {"bad_words": ["a"], "presence_penalty": 0.0}}, r"^bad_words = \['a'\] chang"),
        (COLOCATE, {"vllm_structured_outputs_regex": "a+"}, r"structured_outputs_regex = a\+ changes"),
        (SERVER, {"generation_kwargs": {"min_p": 0.1}}, "min_p = 0.1 leave tokens out, and the answers that TRL asks"),
    ],
    quick=1,
)
def test_settings_that_no_set_shows_are_refused_under_r3_alone(mode, settings, message, folder, monkeypatch):
    for replay, outcome in (("R3", pytest.raises(ConfigError, match=message)), ("none", nullcontext())):
        with monkeypatch.context() as patch:
            colocated(patch)
            served(patch)
            with outcome:
                make(folder, replay=replay, **mode, **settings)


@SCORES_ON_SETS
@pytest.mark.slow
def test_cuts_by_settings_and_generation_kwargs_bring_the_masks_of_a_colocated_vllm(folder, monkeypatch):
    """The stand-in samples in bfloat16: what is left of the mismatch is rounding."""
    k3 = {}
    for replay in ("R3", "none"):
        with monkeypatch.context() as patch:
            colocated(patch)
            settings = {"top_p": 0.5, "generation_kwargs": {"top_k": 30, "seed": 1}, **COLOCATE}
            trainer = trained(folder, replay=replay, max_steps=1, **settings)
            k3[replay] = logged(trainer, "mismatch/k3")[0]
    assert k3["R3"] < 1e-3 < 1e-1 < k3["none"]
