"""Sampling that leaves tokens out or moves scores: passes are scored on the sets of the rollout, and moves are refused.

The oracle of log-probs makes dense logits in float64, with minus infinity outside of the sets.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as of
from trl.trainer import utils

from examples.trl.tiny import policy
from foreroute.capture.sampling_masks import masks_of_steps
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import BatchMismatchError, ConfigError, RankError, ReplayError, TraceContentError
from foreroute.trace import SAMPLING
from foreroute.trainers.trl import GRPOTrainer, rollout_with
from foreroute.trainers.trl.capture_generate import SampledTokens
from foreroute.trainers.trl.masked_head import HEAD, scored_on_sampling_masks
from tests.tiers import grid
from tests.trainers.trl.trl_runs import logged, make, saved_policy, trained
from tests.trainers.trl.vllm_fakes import COLOCATE, SERVER, colocated, served

SCORES_ON_SETS = pytest.mark.skipif(
    not hasattr(utils, "add_fused_lm_head"),
    reason="this TRL makes log-probs past the head that sampling masks stand on",
)

CUTS = {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.7}


class Watched(GRPOTrainer):
    """Keeps what every pass was given and gave, with the rollout that it belongs to."""

    def _get_per_token_logps_and_entropies(self, model, *args, **options):
        result = super()._get_per_token_logps_and_entropies(model, *args, **options)
        rollout = self.routing.rollout
        if rollout is not None:  # the check of the first rollout comes before it is taken
            unwrapped = self.accelerator.unwrap_model(model)
            weights = {name: each.detach().clone() for name, each in unwrapped.state_dict().items()}
            mine = (unwrapped is self.ref_model, weights, rollout.trace, *args[:3])  # tokens, mask, how many are scored
            vars(self).setdefault("passes", []).append((*mine, result[0].detach().numpy()))
        return result


def dense(model, tokens, own, temperature):
    """float64 [T - 1], NaN where a token has no set."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double() / temperature
    masks = own.streams[SAMPLING]
    scored = np.full(len(tokens) - 1, np.nan)
    for row in np.flatnonzero(masks.valid_N):
        ids = masks.ids[masks.offsets[row] : masks.offsets[row + 1]].tolist()
        left = logits[row][ids] if ids else logits[row]
        scored[row] = logits[row, tokens[row + 1]] - left.logsumexp(0)
    return scored


@SCORES_ON_SETS
@pytest.mark.shows("TRL", "`top_p`, `top_k`, `min_p`: scored on the sets that tokens were drawn from")
def test_old_update_and_reference_passes_are_scored_on_the_sets_of_the_rollout(folder):
    steady = {"beta": 0.1, "max_steps": 2, "learning_rate": 1e-6}
    trainer = trained(folder, cls=Watched, model=saved_policy(folder), **steady, **CUTS)
    assert max(logged(trainer, "mismatch/k3")) < 1e-9
    model, seen = policy().eval(), {True: 0, False: 0}
    for is_reference, weights, trace, ids, mask, keep, found in trainer.passes:
        model.load_state_dict(weights)
        sequences = {tuple(trace.tokens(s).tolist()): trace.select([s]) for s in range(len(trace))}
        for row, own_mask in enumerate(mask.bool()):
            tokens, length = ids[row][own_mask].tolist(), int(own_mask[-keep:].sum())
            assert not found[row][length:].any()
            expected = dense(model, tokens, sequences[tuple(tokens)], trainer.temperature)[-length:]
            np.testing.assert_allclose(found[row][:length], expected, atol=2e-5)
            seen[is_reference] += length
    assert seen[False] == 2 * seen[True] > 0  # an old and an update pass, and one of the reference


@SCORES_ON_SETS
def test_log_probs_made_past_the_head_and_of_more_forwards_are_noticed():
    with pytest.raises(ReplayError, match=r"sampling.*replayed"), scored_on_sampling_masks([None]):
        pass
    with pytest.raises(ReplayError, match=r"more.*forwards"), scored_on_sampling_masks([]):
        getattr(utils, HEAD).apply(None, None, None)


TOOL = 2


def without_masks(prompts, trainer):
    output = rollout_with(EmbeddedEngine(policy(), "float32"))(prompts, trainer)
    return {**output, "routed_experts": [each.without_streams(SAMPLING) for each in output["routed_experts"]]}


def with_a_tool(without, env_masks=None):
    """A `rollout_func` of our engine with an `env_mask`, whose traces lack the masks of some tokens."""
    sample = rollout_with(EmbeddedEngine(policy(), "float32"))

    def roll_out(prompts, trainer):
        output = sample(prompts, trainer)
        own = [[int(i != TOOL) for i in range(len(ids))] for ids in output["completion_ids"]]
        rows = [len(ids) - 1 + without for ids in output["prompt_ids"]]
        traces = [
            each.with_stream(SAMPLING, each.streams[SAMPLING].without(np.array([row])))
            for each, row in zip(output["routed_experts"], rows, strict=True)
        ]
        return {**output, "routed_experts": traces, "env_mask": own if env_masks is None else env_masks}

    return roll_out


@SCORES_ON_SETS
@pytest.mark.slow
@grid(
    ("settings", "error", "message"),
    [
        ({"rollout_func": without_masks}, ReplayError, r"top_p = 0.8.*rollout"),
        ({"rollout_func": with_a_tool(TOOL + 1)}, TraceContentError, "sampling mask"),
        ({"rollout_func": with_a_tool(TOOL, [[1, 0, 1]] * 8)}, BatchMismatchError, r"env_mask.*completions"),
    ],
    ids=["none", "not of a sampled token", "env_mask"],
    quick=2,
)
def test_masks_that_are_missing_are_noticed(settings, error, message, folder):
    with pytest.raises(error, match=message):
        make(folder, max_steps=1, top_p=0.8, **settings).train()


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


@pytest.mark.parametrize("others", [*([each] for each in [*LEFT_OUT, *MOVED]), LEFT_OUT])
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


@pytest.mark.slow
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
        (COLOCATE, {"generation_kwargs": {"temperature": 0}}, r"temperature 0, .*TRL.*1\.0"),
        (COLOCATE, {"generation_kwargs": {"top_p": 0.5}}, r"top_p = 0\.5 .*vLLM .*top_k alone"),
        (COLOCATE, {"generation_kwargs": {"bad_words": ["a"], "presence_penalty": 0.0}}, r"^bad_words = \['a'\] chang"),
        (COLOCATE, {"vllm_structured_outputs_regex": "a+"}, r"structured_outputs_regex = a\+ changes"),
        (SERVER, {"generation_kwargs": {"min_p": 0.1}}, r"min_p = 0\.1 .*answers.*TRL"),
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
