"""Sampling by top-p, top-k and min-p under TRL: every pass is scored on the sets that the rollout drew from.

The oracle makes dense logits in float64, with minus infinity outside of the sets.
"""

import numpy as np
import pytest
import torch
from trl.trainer import utils

from examples.trl.tiny import policy
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import BatchMismatchError, ReplayError, TraceContentError
from foreroute.trace import SAMPLING
from foreroute.trainers.trl import GRPOTrainer, rollout_with
from foreroute.trainers.trl.masked_head import HEAD, scored_on_sampling_masks
from tests.tiers import grid
from tests.trainers.trl.trl_runs import logged, make, saved_policy, trained

SCORES_ON_SETS = pytestmark = pytest.mark.skipif(
    not hasattr(utils, "add_fused_lm_head"),
    reason="this TRL makes log-probs past the head that sampling masks stand on",
)

CUTS = {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.7}


class Watched(GRPOTrainer):
    """Keeps what every pass was given and gave, with the rollout that it belongs to."""

    def __init__(self, *args, **kwargs):
        self.passes = []
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **options):
        result = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **options
        )
        rollout = self.routing.rollout
        if rollout is not None:  # the check of the first rollout comes before it is taken
            unwrapped = self.accelerator.unwrap_model(model)
            weights = {name: each.detach().clone() for name, each in unwrapped.state_dict().items()}
            mine = (unwrapped is self.ref_model, weights, rollout.trace, input_ids, attention_mask, logits_to_keep)
            self.passes.append((*mine, result[0].detach().numpy()))
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


def scored(folder, **settings):
    """(whether it is the reference's, log-probs of its completion, those of `dense`), by pass and sequence of a run."""
    steady = {"beta": 0.1, "max_steps": 2, "learning_rate": 1e-6}
    trainer = trained(folder, kind=Watched, model=saved_policy(folder), **steady, **settings)
    assert max(logged(trainer, "mismatch/k3")) < 1e-9
    model = policy().eval()
    for is_reference, weights, trace, ids, mask, keep, found in trainer.passes:
        model.load_state_dict(weights)
        sequences = {tuple(trace.tokens(s).tolist()): trace.select([s]) for s in range(len(trace))}
        for row, own_mask in enumerate(mask.bool()):
            tokens, length = ids[row][own_mask].tolist(), int(own_mask[-keep:].sum())
            assert not found[row][length:].any()
            expected = dense(model, tokens, sequences[tuple(tokens)], trainer.temperature)[-length:]
            yield is_reference, found[row][:length], expected


@pytest.mark.shows("TRL", "`top_p`, `top_k`, `min_p`: scored on the sets that tokens were drawn from")
def test_old_update_and_reference_passes_are_scored_on_the_sets_of_the_rollout(folder):
    seen = {True: 0, False: 0}
    for is_reference, found, expected in scored(folder, **CUTS):
        np.testing.assert_allclose(found, expected, atol=2e-5)
        seen[is_reference] += len(found)
    assert seen[False] == 2 * seen[True] > 0  # an old and an update pass, and one of the reference


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
