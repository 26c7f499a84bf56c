"""Recordings along a key-value cache whose rows somebody changes between two forwards."""

import copy
import inspect
from contextlib import nullcontext

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
SWAPPED = torch.tensor([1, 0])
CACHE = "cache" if "cache" in inspect.signature(Qwen3MoeModel.forward).parameters else "past_key_values"
"""What transformers calls it: from 5.24 on, and before."""


@pytest.fixture(scope="module", params=[attach, hf.attach], ids=["tensors", "trace"])
def routed(request):
    return request.param(tiny("qwen3_moe", num_hidden_layers=2).eval())


def prefilled(model):
    return model(input_ids=PROMPTS, use_cache=True).past_key_values


def decode(model, cache, rows=2):
    return model(input_ids=torch.full((rows, 1), 5), past_key_values=cache, use_cache=True)


def test_a_cache_of_another_batch_or_a_copy_or_fewer_rows_is_refused(routed):
    model = routed.model
    with routed.record(), torch.inference_mode():
        cache = prefilled(model)
        cache.batch_select_indices(SWAPPED[:1])
        with pytest.raises(ReplayError, match="selected"):
            decode(model, cache, rows=1)
    with routed.record(), torch.no_grad():
        first = prefilled(model)
        model(input_ids=PROMPTS.flip(0), use_cache=False)
        with pytest.raises(ReplayError, match="another batch"):
            decode(model, first)
        second = prefilled(model)
        with pytest.raises(ReplayError, match="or copied"):
            decode(model, copy.deepcopy(second))


def grown(cache, num, generator):
    """What a forward of `num` tokens does to it."""
    for layer in range(2):
        cache.update(*torch.randn(2, 2, 1, num, 3, generator=generator), layer)


def each_tensor(change):
    def changed(cache):
        for layer in cache.layers:
            layer.keys, layer.values = change(layer.keys), change(layer.values)

    return changed


TOUCHES = {
    "cut": lambda cache: cache.crop(-1),
    "an end taken away": each_tensor(lambda tensor: tensor[..., :-1, :]),
    "a beginning taken away": each_tensor(lambda tensor: tensor[..., 1:, :]),
    "reordered": each_tensor(lambda tensor: tensor.flip(0)),
    "selected": each_tensor(lambda tensor: tensor[-1:]),
    "repeated": each_tensor(lambda tensor: torch.cat([tensor, tensor[..., -1:, :]], -2)),
    "written to": lambda cache: cache.layers[1].values[..., :1, :].add_(1),
    "of other layers": lambda cache: cache.layers[0].crop(-1),
}
"""What may be done to a cache between two forwards."""


@pytest.mark.parametrize("touch", [None, *TOUCHES])
def test_a_cache_is_followed_that_nobody_touched(touch):
    cache, followed, generator = DynamicCache(), FollowedCache(), torch.Generator().manual_seed(0)
    for _ in range(2):
        followed.run(cache, lambda: grown(cache, 6, generator))
    if touch is not None:
        TOUCHES[touch](cache)
    with pytest.raises(ReplayError, match="mix sequences") if touch else nullcontext():
        followed.run(cache, lambda: None)


@pytest.mark.shows("Hugging Face", "`num_beams` above 1", refused="beams change their places after they were routed")
def test_beams_are_refused(routed):
    with routed.record(), pytest.raises(ReplayError, match=r"Sample.*num_beams=1"):
        routed.model.generate(PROMPTS, num_beams=2, max_new_tokens=4)


@pytest.mark.shows(
    "Hugging Face", "assisted decoding and prompt lookup", refused="drafts that are rejected are cut off the cache"
)
def test_drafts_that_are_rejected_are_refused(routed):
    # with an end that never comes: older releases look for one in every draft
    options = {"prompt_lookup_num_tokens": 3, "eos_token_id": -1, "do_sample": False, "pad_token_id": 0}
    with routed.record(), pytest.raises(ReplayError, match=r"Sample.*assisted"):
        routed.model.generate(REPEATED, max_new_tokens=12, **options)


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


def test_a_cache_that_hooks_do_not_find_is_refused_when_a_model_is_attached(monkeypatch):
    """As when a release hands it from the model to its trunk in another way than by an argument."""
    for name, nothing in (("find_cache", lambda values: None), ("given_cache", lambda given, error: None)):
        monkeypatch.setattr(core_trunk, name, nothing)
    with pytest.raises(AttachError, match=r"recorded.*sequence"):
        attach(tiny("qwen3_moe", num_hidden_layers=2))
