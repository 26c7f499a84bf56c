"""The trace of a `generate` call: padded prompts, early ends, the token that no router has seen."""

import re
import warnings

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import BatchMismatchError
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of
from tests.tiers import grid

END, PAD = 7, 0


@pytest.fixture(scope="module")
def routed():
    return hf.attach(tiny("qwen3_moe").eval())


def sampled(routed, *, samples=1, end=None, **options):
    """A recording, what `generate` returned, and the mask of a training step over it. `end`: the last step of each."""
    prompts = batch_of(5, 3, 4, side="left")

    def ends(input_ids, scores):
        scores[:, END] = -torch.inf
        for s, last in enumerate(end or []):
            if input_ids.shape[1] - 5 == last:
                scores[s] = -torch.inf
                scores[s, END] = 0
        return scores

    options |= {"max_new_tokens": 8, "num_return_sequences": samples, "pad_token_id": PAD, "eos_token_id": END}
    torch.manual_seed(3)
    with routed.record(weight_version=4) as recording:
        output = routed.model.generate(**prompts, do_sample=True, logits_processor=[ends], **options)
    over = (output[:, 5:] == END).cumsum(1) - (output[:, 5:] == END).long()
    mask = torch.cat([prompts["attention_mask"].repeat_interleave(samples, 0), (over == 0).long()], dim=1)
    return recording, output, mask


@pytest.mark.parametrize(
    ("samples", "end", "attention"),
    [
        (1, [2, 5, 0], None),
        pytest.param(2, [1, 4, 8, 0, 2, 2], "sdpa", marks=pytest.mark.shows("Hugging Face", "static key-value cache")),
        (1, [2, 5, 0], "eager"),
    ],
)
def test_a_rollout_is_what_one_forward_over_it_routes(routed, samples, end, attention):
    """With a static cache too, for which `generate` makes patterns of masks, of truths or of numbers."""
    options = {"cache_implementation": "static"} if attention else {}
    routed.model.set_attn_implementation(attention or "sdpa")
    recording, output, mask = sampled(routed, samples=samples, end=end, **options)
    rollout = recording.rollout(output, mask)
    with routed.record() as whole, torch.no_grad():
        routed.model(input_ids=output, attention_mask=mask)
    full = whole.trace()
    assert rollout.lengths.tolist() == mask.sum(1).tolist()
    assert np.array_equal(rollout.token_ids_N, full.token_ids_N)
    last = rollout.offsets[1:] - 1
    assert np.flatnonzero(~rollout.valid_N).tolist() == last.tolist()
    routed_N = rollout.valid_N
    assert np.array_equal(np.sort(rollout.expert_ids_NLK[routed_N], -1), np.sort(full.expert_ids_NLK[routed_N], -1))
    assert rollout.versions == (4,)
    assert rollout.provenance["engine"] == "transformers"


@pytest.mark.shows(
    "Hugging Face",
    "static key-value cache where every layer has a sliding window",
    refused="its masks do not say what is padding",
)
def test_masks_of_sliding_windows_alone_are_refused():
    routed = hf.attach(tiny("mixtral", sliding_window=6).eval())
    with pytest.raises(BatchMismatchError, match=r"generate.*cache_impl"):
        sampled(routed, cache_implementation="static")
    recording, output, mask = sampled(routed)
    assert recording.rollout(output, mask).lengths.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize(("pad", "behind", "is_told"), [(PAD, PAD, True), (None, END, True), (9, PAD, False)])
def test_padding_that_is_counted_as_tokens_is_told(pad, behind, is_told):
    """Without a mask or with ones, by the configuration; never where the mask says it, nor of one token at the end."""
    model = tiny("qwen3_moe").eval()
    model.config.pad_token_id, model.generation_config.eos_token_id = pad, END
    routed = hf.attach(model)
    tokens = torch.tensor([[3, 4, 5, END, behind, behind], [3, 4, 5, 6, 8, END]])
    with routed.record() as recording, torch.no_grad():
        model(input_ids=tokens)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recording.rollout(tokens, torch.ones_like(tokens))
        assert [each.filename for each in told] == [__file__] * is_told
        assert all(re.search("padding.*attention_mask", str(each.message)) for each in told)
        told.clear()
        recording.rollout(tokens, torch.arange(6) < torch.tensor([[4], [6]]))
        assert not told


@grid(
    ("given", "message"),
    [
        (lambda o, m: (o,), r"sequence 1, position 0.*token 0.*rollout"),
        (lambda o, m: (o[:2], m[:2]), r"3 sequences.*rollout has 2"),
        (lambda o, m: (o, m[:, :5]), r"attention_mask.*\(3, 5\).*\(3, 11\)"),
        (lambda o, m: (o[0],), r"Tensor.*\(11,\)"),
        (lambda o, m: ([[1, [2]], *o[1:]],), r"sequence 0, a list.*array"),
        (lambda o, m: ([*o], m), r"no padding.*attention_mask"),
        (lambda o, m: (o.repeat(1, 2), m.repeat(1, 2)), "sequence 0, position 8: token"),
    ],
    quick=5,
)
def test_sequences_that_are_not_those_recorded_are_refused(routed, given, message):
    recording, output, mask = sampled(routed, end=[2, 5, 0])
    with pytest.raises(BatchMismatchError, match=message):
        recording.rollout(*given(output, mask))


@pytest.mark.shows(
    "Hugging Face",
    "`use_cache=False` in `generate`",
    refused="each forward runs whole sequences anew, and none is the last",
)
def test_a_rollout_without_a_cache_is_refused(routed):
    recording, output, mask = sampled(routed, use_cache=False)
    with pytest.raises(BatchMismatchError, match=r"use_cache.*model.eval"):
        recording.rollout(output, mask)
