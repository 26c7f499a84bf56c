"""What `attach` asks of a model: arguments of a call, a mode, and where it selects."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from foreroute.core import AttachError, ReplayError, attach
from foreroute.testing.models import tiny

TOKENS = torch.arange(20).view(2, 10)


def mixed(experts, x, weights, ids):
    each = torch.stack([expert(x) for expert in experts], -2)
    return (each.gather(-2, ids[..., None].expand(*ids.shape, 16)) * weights[..., None]).sum(-2)


class Block(nn.Module):
    """Selects by itself: no class name says that it routes."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 6, bias=False)
        self.experts = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(6)])

    def forward(self, x):
        rows = x.flatten(0, 1)
        return x + self.mix(rows, *self.pick(rows)).view(x.shape)

    def pick(self, rows):
        return self.gate(rows).softmax(-1).topk(2, dim=-1)

    def mix(self, rows, weights, ids):
        return mixed(self.experts, rows, weights, ids)


class PickingInForward(Block):
    """Nothing returns ids."""

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2, dim=-1)
        return x + mixed(self.experts, x, weights, ids)


class SomeExperts(nn.ModuleList):
    def forward(self, x, ids, weights):
        return mixed(self, x, weights, ids)


class CallingExperts(Block):
    """Hands ids to a module of its own."""

    def __init__(self):
        super().__init__()
        self.experts = SomeExperts(self.experts)

    def mix(self, rows, weights, ids):
        return self.experts(rows, ids, weights)


class MaskingBelow(Block):
    """Gives weights of experts below the second best score away, whatever ids say."""

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        weights, ids = scores.topk(2, dim=-1)
        kept = weights >= scores.sort(-1).values[..., -2:-1]
        return x + mixed(self.experts, x, weights * kept, ids)


class Model(nn.Module):
    def __init__(self, block=Block, loops=1):
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


@pytest.mark.parametrize("block", [Block, PickingInForward, CallingExperts])
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


@pytest.mark.parametrize(
    ("block", "loops", "example", "said"),
    [
        (MaskingBelow, 1, EXAMPLE, r"layers.0 \(MaskingBelow\).*no weight"),
        (Block, 3, EXAMPLE, r"layers.0 \(Block\) .* selects 3 .* Model"),
        (nn.Identity, 1, EXAMPLE, r"Router.* none makes"),
        (Block, 1, None, r"attach\(model, example=.* tokens, scale;"),
        (Block, 1, {"scale": 1.0}, r"has scale; .* Model"),
        (Block, 1, TOKENS, "is a Tensor"),
        (Block, 1, {"tokens": TOKENS}, r"in eval.* tokens alone"),
    ],
)
def test_what_does_not_select_once_or_proves_nothing_is_named(block, loops, example, said):
    with pytest.raises(AttachError, match=said):
        attach(Model(block, loops).eval(), example)


def test_a_forward_without_tokens_is_refused():
    routed = attach(Model(), EXAMPLE)
    with pytest.raises(ReplayError, match=r"neither tokens.* inputs_embeds"), routed.record():
        routed.model(tokens=None, scale=1.0)


def test_a_block_that_swaps_ids_behind_its_router_is_told_once_in_every_session():
    """As a framework's own replay does. The model is as attached until a session is open."""
    model = tiny("qwen3_moe", num_hidden_layers=2)
    routed, experts, hooks = attach(model), model.model.layers[1].mlp.experts, []
    with routed.record() as recording:
        model(input_ids=TOKENS)
    [own] = recording.ids()

    def swap(_, args):
        hooks.append(len(experts._forward_pre_hooks))
        return args[0], (args[1] + 1) % 8, *args[2:]

    handle = experts.register_forward_pre_hook(swap)
    for session in (routed.record, lambda: routed.replay(own)):
        said = r"layers.1.mlp.gate.*layers.1.mlp.experts.*other ids"
        with pytest.raises(ReplayError, match=said), session():
            model(input_ids=TOKENS)
    handle.remove()
    failing = experts.register_forward_pre_hook(lambda *_: 1 / 0)  # which is no look at them
    with routed.record():
        with pytest.raises(ZeroDivisionError):
            model(input_ids=TOKENS)
        failing.remove()
        handle = experts.register_forward_pre_hook(lambda _, args: (args[0], (args[1] + 1) % 8, *args[2:]))
        with pytest.raises(ReplayError, match=r"layers.1.*handed"):
            model(input_ids=TOKENS)
        handle.remove()
        model(input_ids=TOKENS)
    with routed.record(), routed.replay(own):
        model(input_ids=TOKENS)
        assert not experts._forward_pre_hooks  # looked at once
        model(input_ids=TOKENS)
    assert hooks == [2, 2]
