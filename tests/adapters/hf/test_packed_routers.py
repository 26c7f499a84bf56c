"""A router that a quantizing loader packed is named. `tests/settings` has the loaders; here is what they leave."""

import warnings

import pytest
import torch
from torch import nn

from foreroute.adapters import hf
from foreroute.doctor import Severity, diagnose
from foreroute.doctor.examine import examine
from tests.adapters.hf.families import build


class Packed(nn.Linear):
    """A projection whose `weight` is stored otherwise than it computes."""

    def forward(self, hidden):
        return nn.functional.linear(hidden, self.whole)


def as_bytes(linear):
    return nn.Parameter((linear.weight * 100).to(torch.int8), requires_grad=False)


def in_bytes(linear):
    linear.weight = as_bytes(linear)


def in_words(linear):
    words, scales = as_bytes(linear).data.view(torch.int32), linear.weight[:1].detach().half()
    del linear.weight
    linear.register_buffer("qweight", words)
    linear.register_buffer("scales", scales)


def packed_model(store, path="mlp.router.gate"):
    model = build("afmoe")
    for layer in model.model.layers:
        if hasattr(layer.mlp, "router"):  # else dense
            linear = layer.get_submodule(path)
            linear.__class__, linear.whole = Packed, linear.weight.detach()
            store(linear)
    return model


@pytest.mark.parametrize(("store", "dtype"), [(in_bytes, "int8"), (in_words, "int32")])
def test_a_packed_router_is_named_with_what_leaves_it_whole(store, dtype):
    model = packed_model(store)
    with pytest.warns(UserWarning, match=r"weights.*routers") as warned:
        hf.attach(model)
    [said] = [str(each.message) for each in warned if "packed" in str(each.message)]
    assert f"({dtype} in model.layers.1.mlp.router.gate, 2 in all)" in said
    assert "llm_int8_skip_modules = ['lm_head', 'mlp.router.gate']" in said
    [found] = [found for found in diagnose(examine(model, None)).findings if found.topic == "weights"]
    assert found.severity is Severity.WARNING
    assert found.advice.startswith("Leave mlp.router.gate out of quantization")


def test_whole_routers_are_not_whatever_else_is_packed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.attach(packed_model(in_bytes, "self_attn.o_proj"))
