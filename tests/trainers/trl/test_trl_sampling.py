"""Sampling that comes past TRL's own arguments: what leaves tokens out is scored on sets, what moves log-probs refused.

The oracle is the sampler: `generate` notes the log-probs of the scores that it drew from, and a vLLM returns them.
"""

from contextlib import nullcontext

import pytest
import torch
from transformers.generation import logits_process as of

from examples.trl.tiny import policy
from foreroute.errors import ConfigError
from foreroute.trainers.trl.settings import LEAVING_OUT
from tests.tiers import grid
from tests.trainers.trl.test_trl_masks import SCORES_ON_SETS
from tests.trainers.trl.trl_runs import logged, make, trained
from tests.trainers.trl.vllm_fakes import COLOCATE, SERVER, as_they_are, colocated, served


def test_processors_that_are_trusted_keep_the_distances_of_what_they_leave():
    """Each on random scores of a vocabulary of 12, at the first token behind a prompt."""
    prompt, end = torch.tensor([[3, 4, 3, 5, 3]] * 2), torch.tensor([1])
    processors = [
        of.EncoderNoRepeatNGramLogitsProcessor(2, prompt),
        of.EpsilonLogitsWarper(0.05),
        of.EtaLogitsWarper(0.2),
        of.ForcedBOSTokenLogitsProcessor(6),
        of.ForcedEOSTokenLogitsProcessor(6, end),
        of.MinLengthLogitsProcessor(9, end),
        of.MinNewTokensLengthLogitsProcessor(5, 2, end),
        of.MinPLogitsWarper(0.3),
        of.NoBadWordsLogitsProcessor([[7], [3, 8]], end),
        of.NoRepeatNGramLogitsProcessor(2),
        of.PrefixConstrainedLogitsProcessor(lambda sequence, tokens: [2, 9, 11], 1),
        of.SuppressTokensAtBeginLogitsProcessor([2, 3], 5),
        of.SuppressTokensLogitsProcessor([4, 5]),
        of.TopHLogitsWarper(0.5),
        of.TopKLogitsWarper(4),
        of.TopPLogitsWarper(0.6),
        of.TypicalLogitsWarper(0.5),
    ]
    assert {type(each).__name__ for each in processors} == LEAVING_OUT
    scores = 2 * torch.randn(2, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for each in processors:
        ids = prompt[:, :1] if isinstance(each, of.ForcedBOSTokenLogitsProcessor) else prompt
        for before, after in zip(scores, each(ids, scores.clone()), strict=True):
            left = after != -torch.inf
            assert 0 < left.sum() < 12, each
            moved = (after - before)[left]
            assert (moved - moved[0]).abs().max() < 1e-12, each
    penalty = of.RepetitionPenaltyLogitsProcessor(1.3)(prompt, scores.clone()) - scores  # the control
    assert (penalty - penalty[:, :1]).abs().max() > 0.1


def test_generate_is_refused_before_it_samples_what_no_set_shows(folder):
    model = policy()
    model.generation_config.repetition_penalty = 1.3  # as a checkpoint's file would
    trainer = make(folder, model=model, generation_kwargs={"repetition_penalty": None})
    with pytest.raises(ConfigError, match="RepetitionPenaltyLogitsProcessor"):
        trainer.train()


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
            colocated(patch, as_they_are)
            served(patch, as_they_are)
            with outcome:
                make(folder, replay=replay, **mode, **settings)


@SCORES_ON_SETS
@pytest.mark.slow
def test_cuts_by_settings_and_generation_kwargs_bring_the_masks_of_a_colocated_vllm(folder, monkeypatch):
    """The stand-in samples in bfloat16: what is left of the mismatch is rounding."""
    k3 = {}
    for replay in ("R3", "none"):
        with monkeypatch.context() as patch:
            colocated(patch, as_they_are)
            settings = {"top_p": 0.5, "generation_kwargs": {"top_k": 30, "seed": 1}, **COLOCATE}
            trainer = trained(folder, replay=replay, max_steps=1, **settings)
            k3[replay] = logged(trainer, "mismatch/k3")[0]
    assert k3["R3"] < 1e-3 < 1e-1 < k3["none"]
