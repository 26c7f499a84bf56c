"""What forwards leave behind in a model, and what of it an optimizer or a loader finds after attaching and sessions."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from foreroute.core import attach, untouched
from foreroute.core.errors import AttachError, ReplayError
from foreroute.testing.models import tiny

TOKENS = torch.arange(1, 9)[None]


class Packed(nn.Parameter):
    """Bytes with scales beside them, as quantizers make them."""


class PackingLinear(nn.Linear):
    """Packs its weight anew in its first forward without training, for a kernel that keeps no graph."""

    def __init__(self, size=32):
        super().__init__(size, size, bias=False)
        bytes_ = (self.weight.detach() * 100).to(torch.int8)
        self.weight = Packed(bytes_, requires_grad=False)
        self.weight.scales = SimpleNamespace(scale=torch.ones(1), is_packed_for_inference=False)
        self.lora = nn.Parameter(torch.full((size, size), 0.01))

    def forward(self, rows):
        scales = self.weight.scales
        if not self.training and not rows.requires_grad and not scales.is_packed_for_inference:
            self.weight.data = self.weight.data.t().contiguous().reshape(-1, 2)
            scales.scale, scales.is_packed_for_inference = torch.full((1,), 2.0), True
        if scales.is_packed_for_inference:
            return rows.detach()
        return rows + rows @ self.lora


def with_front(front):
    model = tiny("qwen3_moe")
    embedding = model.model.embed_tokens
    embedding.front = front
    embedding.register_forward_hook(lambda module, _, rows: module.front(rows))
    return model


class AmaxHistory(nn.Module):
    """As float8 layers keep it; in a new tensor each time, and a count that is no tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("amax", torch.zeros(4))
        self.num_calls = 0

    def forward(self, rows):
        self.amax = torch.cat([self.amax[1:], rows.detach().abs().max()[None]])
        self.num_calls += 1
        return rows


class ReplacesItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, rows):
        self.weight = nn.Parameter(self.weight.detach().clone())
        return rows * self.weight


def seen_by_an_optimizer(model):
    """Name, identity, shape, dtype and storage of every parameter and buffer; plain attributes; random numbers."""
    tensors = {
        name: (id(each), each.shape, each.dtype, each.untyped_storage().data_ptr(), each.tolist())
        for name, each in [*model.named_parameters(), *model.named_buffers()]
    }
    plain = {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | torch.dtype | type(None))
    }
    return tensors, plain, torch.get_rng_state().tolist()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("front", [PackingLinear, AmaxHistory, nn.Dropout])
def test_attaching_leaves_nothing_behind(front, training):
    model = with_front(front()).train(training)
    before = seen_by_an_optimizer(model)
    attach(model)
    assert seen_by_an_optimizer(model) == before
    model.train(front is nn.Dropout)
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    assert seen_by_an_optimizer(model) != before, "the control: a forward alone leaves something"


@pytest.mark.parametrize("mended", [True, False])
def test_packed_weights_train_adapters_after_sessions_in_eval_mode(mended, monkeypatch):
    if not mended:
        monkeypatch.setattr(untouched._Values, "put_back", lambda held: None)
    model = with_front(PackingLinear())
    routed = attach(model)
    model.eval()
    with torch.no_grad(), routed.record() as recording:
        model(input_ids=TOKENS, use_cache=False)
    with torch.no_grad(), routed.replay(recording.ids()[0]):
        model(input_ids=TOKENS, use_cache=False)
    model.train()
    model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert (model.get_parameter("model.embed_tokens.front.lora").grad is not None) == mended


def test_a_parameter_that_a_forward_or_a_session_replaces_is_named_and_the_model_left():
    model = with_front(nn.Identity())
    routed = attach(model)
    model.model.embed_tokens.front = ReplacesItsWeight()
    with pytest.raises(ReplayError), torch.no_grad(), routed.record():
        model(input_ids=TOKENS, use_cache=False)
    before = seen_by_an_optimizer(model)
    with pytest.raises(AttachError, match=r"parameter.*model\.embed_tokens\.front\.weight"):
        attach(model)
    assert seen_by_an_optimizer(model) == before
