"""What attach finds out by itself: routers written as no family has them yet, right ones and wrong ones."""

from functools import partial

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from foreroute.adapters import hf
from foreroute.core.selection_rules import RULES
from foreroute.errors import AttachError
from foreroute.testing.models import tiny
from tests.adapters.hf.families import build


class FutureRouter(Qwen3MoeTopKRouter):
    """Takes gate weights from what it selects by."""

    def forward(self, hidden):
        hidden = hidden.reshape(-1, self.hidden_dim)
        logits = torch.nn.functional.linear(hidden, self.weight)
        values, ids = self.select(logits.softmax(-1))
        return logits, values, ids

    def select(self, scores):
        return torch.topk(scores, self.top_k, dim=-1)


def limited_to_groups(mask):
    """A router in which two of four groups of experts are open to a token; `mask(scores, open)` closes the others."""

    class GroupedRouter(FutureRouter):
        def select(self, scores):
            groups = scores.view(len(scores), 4, -1).max(-1).values
            best = torch.topk(groups, 2, dim=-1).indices
            is_open = torch.zeros_like(groups).scatter_(1, best, 1)[..., None].expand(-1, -1, 2).reshape(scores.shape)
            return torch.topk(mask(scores, is_open), self.top_k, dim=-1)

    return GroupedRouter


def with_router(router_class, layers=slice(None)):
    model = build("qwen3_moe")
    for layer in model.model.layers[layers]:
        layer.mlp.gate.__class__ = router_class
    return model


class ArgSortRouter(FutureRouter):
    def select(self, scores):
        ids = scores.argsort(-1, descending=True)[:, : self.top_k]
        return scores.gather(-1, ids), ids


class OwnWayRouter(ArgSortRouter):
    """Makes a top-k and then does as it likes."""

    def select(self, scores):
        torch.topk(scores, self.top_k, dim=-1)
        return super().select(scores)


def changed(family, change):
    model = build(family)
    change(model, model.model.layers)
    return model


def head_that_fails(model, layers):
    model.lm_head = torch.nn.Linear(1, 1)


def past_its_router(model, layers):
    layers[1].mlp.forward = lambda hidden: hidden


def sharing_a_router(model, layers):
    layers[2].mlp.gate = layers[0].mlp.gate


def table_of_zeros(model, layers):
    layers[0].mlp.gate.tid2eid.zero_()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (partial(with_router, limited_to_groups(lambda scores, is_open: scores * is_open)), "weight zero"),
        (partial(with_router, ArgSortRouter), r"no top-k.*selection"),
        (
            partial(with_router, OwnWayRouter, slice(1, 2)),
            r"layers\.1\.mlp\.gate \(OwnWayRouter\).*other experts.* not obeyed",
        ),
        (partial(changed, "qwen3_moe", head_that_fails), r"without foreroute.*attach\(model, example="),
        (partial(changed, "qwen3_moe", past_its_router), r"layers\.1\.mlp\.gate .*not run.*layer did"),
        (partial(changed, "qwen3_moe", sharing_a_router), r"layers\.0\.mlp\.gate, .*layers\.2\.mlp\.gate .*2 times"),
        (partial(changed, "deepseek_v4", table_of_zeros), "K different picks"),
        (lambda: torch.nn.ModuleDict({"encoder": tiny(), "decoder": tiny()}), r"ModuleDict.*encoder"),
    ],
)
def test_a_model_that_replay_would_not_reach_everywhere_is_refused(make, reason):
    with pytest.raises(AttachError, match=reason):
        hf.attach(make())


NEEDED_RULES = {"DeepseekV4HashRouter": "deepseek_v4", "JetMoeTopKGating": "jetmoe", "PhimoeTopKRouter": "phimoe"}


@pytest.mark.parametrize("router", NEEDED_RULES)
def test_without_its_rule_a_class_is_refused_and_not_replayed_wrongly(router, monkeypatch):
    assert RULES.keys() - NEEDED_RULES.keys() == {"ZayaRouter"}  # whose rule only keeps the probe off its skip class
    monkeypatch.delitem(RULES, router)
    with pytest.raises(AttachError):
        hf.attach(build(NEEDED_RULES[router]))
