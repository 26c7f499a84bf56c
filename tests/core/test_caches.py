"""Recordings along a key-value cache that somebody changes; the oracle is one forward without a cache."""

import copy
import inspect
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3MoeModel

from foreroute.adapters import hf
from foreroute.core import AttachError, ReplayError, attach
from foreroute.core import trunk as core_trunk
from foreroute.core.caches import FollowedCache
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of

PROMPTS = batch_of(4, 4)["input_ids"]
REPEATED = torch.tensor([[3, 5, 7, 3, 5, 7, 3, 5]])
CACHE = "cache" if "cache" in inspect.signature(Qwen3MoeModel.forward).parameters else "past_key_values"
"""What transformers calls it: from 5.24 on, and before."""


@pytest.fixture(scope="module", params=[attach, hf.attach], ids=["tensors", "trace"])
def routed(request):
    return request.param(tiny("qwen3_moe", num_hidden_layers=2).eval())


def test_a_cache_of_another_batch_or_a_copy_or_fewer_rows_is_refused(routed):
    def decode(cache, said, rows=2):
        with pytest.raises(ReplayError, match=said):
            routed.model(input_ids=torch.full((rows, 1), 5), past_key_values=cache, use_cache=True)

    for mode in (torch.inference_mode, torch.no_grad):
        with routed.record(), mode():
            selected = routed.model(input_ids=PROMPTS, use_cache=True).past_key_values
            selected.batch_select_indices(torch.tensor([1]))
            decode(selected, "selected", rows=1)
            first = routed.model(input_ids=PROMPTS, use_cache=True).past_key_values
            decode(copy.deepcopy(first), "or copied")
            routed.model(input_ids=PROMPTS.flip(0), use_cache=False)
            decode(first, "another batch")


def ids_of(recording):
    """int64 [B, T, L, K]."""
    if hasattr(recording, "ids"):
        [ids] = recording.ids()
        return ids
    trace = recording.trace()
    return torch.from_numpy(trace.expert_ids_NLK.astype(int)).view(len(trace), -1, *trace.expert_ids_NLK.shape[1:])


def require_recorded(routed, recording, tokens, *, may_have_more=False):
    """The recording is that of one forward without a cache over these tokens, and perhaps of rows behind them."""
    with routed.record() as whole, torch.no_grad():
        routed.model(input_ids=tokens, use_cache=False)
    seen, expected = (ids_of(each).sort(-1).values for each in (recording, whole))
    assert torch.equal(seen[:, : expected.shape[1]] if may_have_more else seen, expected)


def grown(cache, num, generator):
    """What a forward of `num` tokens does to it."""
    for layer in range(2):
        cache.update(*torch.randn(2, 2, 1, num, 3, generator=generator), layer)


def copied(cache):
    return [each.clone() for layer in cache.layers for each in (layer.keys, layer.values)]


def each_tensor(change):
    def changed(cache):
        for layer in cache.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)

    return changed


FOLLOWED = [
    lambda cache: cache.crop(-1),
    lambda cache: cache.crop(-2),
    each_tensor(lambda tensor: tensor[..., :-1, :]),
    each_tensor(lambda tensor: tensor[:]),
    lambda cache: None,
]
"""What may be done to a cache between two forwards, in any order, and takes its end away at most."""
REFUSED = [
    each_tensor(lambda tensor: tensor[..., 1:, :]),
    each_tensor(lambda tensor: tensor.flip(0)),
    each_tensor(lambda tensor: tensor[-1:]),
    each_tensor(lambda tensor: tensor.clone()),
    each_tensor(lambda tensor: torch.cat([tensor, tensor[..., -1:, :]], -2)),
    lambda cache: cache.layers[1].values[..., :1, :].add_(1),
    lambda cache: cache.layers[0].crop(-1),
]
"""What may be done to it besides, which may be refused."""


def test_a_cache_that_is_followed_holds_the_positions_that_it_held():
    """By value, whatever is done to it; and one that only lost its end is followed."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    outcomes = Counter()
    for _ in range(200):
        cache, followed = DynamicCache(), FollowedCache()
        followed.run(cache, lambda cache=cache: grown(cache, 6, generator))
        held = copied(cache)
        touches = rng.choice(FOLLOWED + REFUSED, 2)
        for touch in touches:
            touch(cache)
        past, now = cache.get_seq_length(), copied(cache)
        is_held = all(torch.equal(each, before[..., :past, :]) for each, before in zip(now, held, strict=True))
        try:
            followed.run(cache, lambda: None)
        except ReplayError:
            assert any(touch in REFUSED for touch in touches), "it only lost its end"
            outcomes["refused"] += 1
        else:
            assert is_held
            outcomes["shorter" if past < 6 else "whole"] += 1
    assert len(outcomes) == 3


@pytest.mark.shows("Hugging Face", "`num_beams` above 1", refused="beams change their places after they were routed")
def test_beams_are_refused(routed):
    with routed.record(), pytest.raises(ReplayError, match=r"Sample.*num_beams=1"):
        routed.model.generate(PROMPTS, num_beams=2, max_new_tokens=4)


@pytest.mark.shows("Hugging Face", "assisted decoding and prompt lookup, rejected drafts left out")
@pytest.mark.parametrize("how", ["prompt lookup", "an assistant", "sliding windows"])
def test_drafts_that_are_rejected_are_left_out(routed, how):
    """Layers of sliding windows keep what a window shows, cut at both ends."""
    if how == "sliding windows":
        routed = attach(tiny("gpt_oss", sliding_window=6, num_hidden_layers=2).eval())
    # with an end that never comes: older releases look for one in every draft
    options = {"prompt_lookup_num_tokens": 3, "eos_token_id": -1}
    if how == "an assistant":
        options = {"assistant_model": tiny("qwen3_moe", num_hidden_layers=2, seed=1).eval()}
    rows = []  # of every forward; rejected drafts are among them
    note = lambda _, args, given: rows.append(given["input_ids"].shape[1])  # noqa: E731
    counted = routed.model.model.register_forward_pre_hook(note, with_kwargs=True)
    with routed.record() as recording, counted:
        sampled = routed.model.generate(REPEATED, max_new_tokens=12, do_sample=False, pad_token_id=0, **options)
    require_recorded(routed, recording, sampled[:, :-1], may_have_more=how == "sliding windows")
    assert sum(rows) > sampled.shape[1] - 1, "the control: drafts were rejected, and computed"


class LengthAlone:
    """Says its length, and keeps its tensors where nobody looks."""

    def __init__(self, cache):
        self.cache = lambda: cache

    def __getattr__(self, name):
        if name in ("get_seq_length", "reorder_cache"):
            return getattr(self.cache(), name)
        raise AttributeError(name)


def test_a_cache_of_unknown_form_is_refused_when_a_model_is_attached():
    """As of a release that nobody here has seen."""
    model = tiny("qwen3_moe", num_hidden_layers=2).eval()
    forward = model.model.forward

    def handing(*args, **kwargs):
        cache = kwargs.get(CACHE)
        output = forward(*args, **{**kwargs, CACHE: cache.cache() if isinstance(cache, LengthAlone) else cache})
        output[CACHE] = output.get(CACHE) and LengthAlone(output[CACHE])
        return output

    model.model.forward = handing
    with pytest.raises(AttachError, match=r"reordered.*beams"):
        attach(model)


class NeedsAnArgument(DynamicCache):
    """Says its length where it is asked in another way, as of a release that nobody here has seen."""

    def get_seq_length(self, *args, **kwargs):
        if sys._getframe(1).f_globals["__name__"].startswith("foreroute."):
            raise TypeError("get_seq_length() missing 1 required positional argument")
        return super().get_seq_length(*args, **kwargs)


def test_a_cache_that_breaks_recordings_alone_is_refused_when_a_model_is_attached(monkeypatch):
    model = tiny("qwen3_moe", num_hidden_layers=2)
    monkeypatch.setattr(sys.modules[type(model).__module__], "DynamicCache", NeedsAnArgument)
    with pytest.raises(AttachError, match=r"along.*recorded"):
        attach(model)


def test_a_cache_that_hooks_do_not_find_is_refused_when_a_model_is_attached(monkeypatch):
    """As when a release hands it from the model to its trunk in another way than by an argument."""
    for name, nothing in (("find_cache", lambda values: None), ("given_cache", lambda given, error: None)):
        monkeypatch.setattr(core_trunk, name, nothing)
    with pytest.raises(AttachError, match=r"recorded.*sequence"):
        attach(tiny("qwen3_moe", num_hidden_layers=2))
