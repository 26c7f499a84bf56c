"""What `attach` asks of a model: arguments of a call, a mode, and where it selects."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from foreroute.core import AttachError, ReplayError, attach
from foreroute.testing.models import tiny

TOKENS = torch.arange(20).view(2, 10)


class Block(nn.Module):
    """The gate is a Linear, and the block selects: no class name says that it routes."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 6, bias=False)
        self.experts = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(6)])
        self.in_training_alone = False

    def forward(self, x):
        if self.in_training_alone and not self.training:
            raise NotImplementedError
        rows = x.flatten(0, 1)
        weights, ids = self.pick(rows)
        mixed = sum(
            expert(rows) * (weights * (ids == number)).sum(-1, keepdim=True)
            for number, expert in enumerate(self.experts)
        )
        return x + mixed.view(x.shape)

    def pick(self, rows):
        return self.gate(rows).softmax(-1).topk(2, dim=-1)


class PickingInForward(Block):
    """Nothing returns ids."""

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2, dim=-1)
        return x + self.mixed(x, weights, ids)

    def mixed(self, x, weights, ids):
        each = torch.stack([expert(x) for expert in self.experts], -2)
        return (each.gather(-2, ids[..., None].expand(*ids.shape, 16)) * weights[..., None]).sum(-2)


class MaskingBelow(PickingInForward):
    """Gives weights of experts below the second best score away, whatever ids say."""

    def mixed(self, x, weights, ids):
        scores = self.gate(x).softmax(-1)
        return super().mixed(x, weights * (weights >= scores.sort(-1).values[..., -2:-1]), ids)


class Model(nn.Module):
    def __init__(self, block=Block, loops=1, example=True):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList([block() for _ in range(2)])
        self.head = nn.Linear(16, 20)
        self.loops = loops
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, tokens, scale):
        h = self.embed(tokens) * scale
        for _ in range(self.loops):
            for layer in self.layers:
                h = layer(h)
        return self.head(h)


EXAMPLE = {"scale": 1.0, "tokens": TOKENS}


@pytest.mark.parametrize("block", [Block, PickingInForward])
def test_blocks_that_select_by_themselves_are_recorded_and_replayed(block):
    model = Model(block)
    routed = attach(model, EXAMPLE)
    names = ["layers.0", "layers.1"]
    assert [(each.path, each.num_experts, each.top_k) for each in routed.hooks.routers] == [(n, 6, 2) for n in names]
    with routed.record() as recording:
        native = model(**EXAMPLE)
    [own] = recording.ids()
    assert torch.equal(own[:, :, 0], model.layers[0].gate(model.embed(TOKENS)).topk(2).indices)
    with routed.replay(own), torch.no_grad():
        assert torch.equal(model(TOKENS, 1.0), native)
    other = (own.long() + 1) % 6
    with routed.replay(other):
        replayed = model(**EXAMPLE)
    replayed.sum().backward()
    assert all(layer.gate.weight.grad.abs().sum() > 0 for layer in model.layers)
    assert torch.allclose(replayed, by_hand(model, other), atol=1e-5)
    first, second = routed.report()
    assert (first.replayed, first.differing, second.replayed) == (40, 20, 40)


def by_hand(model, ids):
    """The formula, written once more: gate weights of a softmax over all experts."""
    h = model.embed(TOKENS)
    for number, layer in enumerate(model.layers):
        at = ids[:, :, number]
        weights = functional.one_hot(at, 6).sum(-2) * layer.gate(h).softmax(-1)
        h = h + sum(expert(h) * weights[..., e, None] for e, expert in enumerate(layer.experts))
    return model.head(h)


def test_a_block_that_gives_experts_no_weight_is_refused():
    with pytest.raises(AttachError, match=r"layers.0 \(MaskingBelow\).*no weight"):
        attach(Model(MaskingBelow), EXAMPLE)


def test_without_a_router_or_a_block_that_selects_the_error_says_both():
    class Dense(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(AttachError, match=r"Router.* none makes"):
        attach(Model(Dense), EXAMPLE)


def test_the_example_is_asked_for_and_read():
    with pytest.raises(AttachError, match=r"attach\(model, example=.* tokens, scale;"):
        attach(Model())
    with pytest.raises(AttachError, match=r"has scale; .* Model"):
        attach(Model(), {"scale": 1.0})
    with pytest.raises(AttachError, match=r"scale, tokens; .* Model"):
        attach(Model(), {"scale": 1.0, "tokens": TOKENS[:0]})
    with pytest.raises(AttachError, match="is a Tensor"):
        attach(Model(), TOKENS)
    with pytest.raises(AttachError, match=r"in eval.* tokens alone"):
        attach(Model().eval(), {"tokens": TOKENS})
    routed = attach(Model(), EXAMPLE)
    with pytest.raises(ReplayError, match=r"neither tokens.* inputs_embeds"), routed.record():
        routed.model(tokens=None, scale=1.0)


def test_a_model_that_runs_in_training_alone_is_attached_in_it_and_left_so():
    model = Model()
    model.layers[0].in_training_alone = True
    model.layers[1].eval()
    assert len(attach(model, EXAMPLE).hooks.routers) == 2
    assert [module.training for module in model.layers] == [True, False]
    with pytest.raises(AttachError, match=r"in eval.* model\.train"):
        attach(model.eval(), EXAMPLE)


def test_a_loop_over_layers_is_named():
    with pytest.raises(AttachError, match=r"layers.0 \(Block\) .* selects 3 .* Model"):
        attach(Model(loops=3), EXAMPLE)


def test_a_block_that_swaps_ids_behind_its_router_is_told_once_in_every_session():
    """As a framework's own replay does. The model is as attached until a session is open."""
    model = tiny("qwen3_moe", num_hidden_layers=2)
    routed = attach(model)
    batch = {"input_ids": TOKENS}
    with routed.record() as recording:
        model(**batch)
    [own] = recording.ids()
    experts = model.model.layers[1].mlp.experts
    swaps = []

    def swap(_, args):
        swaps.append(len(experts._forward_pre_hooks))
        return args[0], (args[1] + 1) % 8, *args[2:]

    handle = experts.register_forward_pre_hook(swap)
    for session in (routed.record, lambda: routed.replay(own)):
        said = r"layers.1.mlp.gate.*layers.1.mlp.experts.*handed other ids"
        with pytest.raises(ReplayError, match=said), session():
            model(**batch)
    handle.remove()
    with routed.record(), routed.replay(own):
        model(**batch)
        assert not experts._forward_pre_hooks  # looked at once
        model(**batch)
    copy.deepcopy(model)
    assert swaps == [2, 2]
