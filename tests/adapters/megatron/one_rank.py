"""Models of Megatron-Core on one rank, as the properties of sessions take them."""

import traceback
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from foreroute.adapters import megatron
from tests.adapters.megatron import model_chunks
from tests.adapters.megatron.grid import GROUPS, Cell
from tests.adapters.megatron.model_chunks import RECOMPUTE_SETTINGS, initialize
from tests.adapters.megatron.training_step import watching
from tests.replay.session_properties import PROPERTIES
from tests.replay.session_subject import Given, Subject, batch_of

BEFORE, SIGMOID = {"moe_router_pre_softmax": True}, {"moe_router_score_function": "sigmoid"}
GATES = {
    "softmax after": {},
    "softmax before": BEFORE,
    "softmax before, scaled": {**BEFORE, "moe_router_topk_scaling_factor": 2.5},
    "softmax before, one pick": {**BEFORE, "moe_router_topk": 1},
    "softmax before, of groups": {**BEFORE, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    # the sum of two that opens a group may leave the best expert of all outside
    "softmax before, two picks of one group": {**BEFORE, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "sigmoid": SIGMOID,
    "sigmoid with bias": {**SIGMOID, "moe_router_enable_expert_bias": True},
    "sigmoid with bias, of groups, scaled": GROUPS,
    "double precision": {"moe_router_dtype": "fp64"},
    "parameters' precision": {"moe_router_dtype": None},
    "input jitter": {"moe_input_jitter_eps": 0.01},
    "roomy capacity": {"moe_expert_capacity_factor": 4.0, "moe_token_drop_policy": "position"},
}
BY_HAND = {
    "layers by hand, reentrant": ("none", True),
    "layers by hand, non-reentrant": ("none", False),
    "layers by hand around Megatron's own": ("selective", True),
    "layers by hand inside of Megatron's own": ("uniform", False),
}
"""recomputation: (Megatron's own, the kind of checkpoint around each layer)."""


def model(recompute="none", seed=0, layers=4, **settings):
    """In training mode; one layer of four is dense. The expert bias, where it has one, is not zero."""
    settings = {"moe_layer_freq": [1, 0, 1, 1], **settings} if layers == 4 else settings
    initialize(Cell())
    settings |= RECOMPUTE_SETTINGS[recompute]
    [built] = model_chunks.build(Cell(layers=layers, settings=settings), seed)
    for name, buffer in built.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return built.train()


def failures(asked):
    failed = {}
    for name, part in asked:
        try:
            PROPERTIES[name](part(MegatronSubject, name))
        except (Exception, pytest.fail.Exception):
            failed[name, part] = traceback.format_exc()
    return failed


class MegatronSubject(Subject):
    gates = tuple(GATES)
    recomputations = (*RECOMPUTE_SETTINGS, *BY_HAND)

    @classmethod
    def built(cls, gate=None, recompute="none", *, seed=0):
        gate = gate or cls.gates[0]
        within, reentrant = BY_HAND.get(recompute, (recompute, None))
        on = cls(model(within, seed, **GATES[gate]))
        for layer in on.layers if recompute in BY_HAND else ():
            layer.forward = in_a_checkpoint(layer.forward, reentrant)
        return on

    @classmethod
    def with_statistics(cls):
        losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
        return cls(model(**GATES["sigmoid with bias"], **losses))

    @classmethod
    def attach(cls, model):
        return megatron.attach(model)

    @property
    def layers(self):
        return self.model.decoder.layers

    @property
    def overridden(self):
        of_router = ("forward", "_apply_expert_bias", "_apply_aux_loss")
        whole = [(part, "forward") for part in (self.model, self.model.decoder)]
        return whole + [(self.routers[0], name) for name in of_router]

    def run(self, batch, **changes):
        torch.manual_seed(7)  # of jitter
        ids, real_BT = batch.ids_BT, batch.real_BT
        arguments = {
            "input_ids": ids,
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids),
            "attention_mask": torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None],
            "labels": ids.roll(-1, 1),
            "padding_mask": None if real_BT.all() else ~real_BT,
        }
        return -self.model(**{**arguments, **changes})[:, :-1]

    @contextmanager
    def given(self):
        given = []

        def note(column, hidden, routing_map, probs):
            shape = (*hidden.shape[:2], -1)
            map_BTE, weights_BTE = (x.view(shape).transpose(0, 1) for x in (routing_map, probs))
            given.append(Given(column, map_BTE.numpy().copy(), weights_BTE.float().numpy().copy()))

        with watching(dict(enumerate(self.blocks)), note):
            yield given

    @contextmanager
    def scores(self):
        seen = []

        def noting(router, gating, hidden):
            logits = gating(hidden)
            seen.append(selected_by(router, logits.detach().double()).transpose(0, 1))
            return logits

        for router in self.routers:
            router.gating = partial(noting, router, router.gating)
        yield seen
        for router in self.routers:
            del router.gating

    @property
    def selects_by_logits(self):
        config = self.model.config
        return config.moe_router_score_function == "softmax" and not config.moe_router_pre_softmax

    @contextmanager
    def bypassed(self, block):
        kept, route = [], block.route
        with torch.no_grad(), patch.object(block, "route", lambda *args: kept.append(route(*args)) or kept[0]):
            self.run(batch_of())
        with patch.object(block, "route", lambda *args: kept[0]):
            yield

    @contextmanager
    def run_twice(self, block):
        route = block.route
        with patch.object(block, "route", lambda *args: (route(*args), route(*args))[1]):
            yield

    def wrong_calls(self, batch):
        mask, ids = ~batch.real_BT, batch.ids_BT
        changes = {
            r"padding_mask is torch\.float32": {"padding_mask": mask.float()},
            r"padding_mask is torch\.int64": {"padding_mask": mask.long()},
            r"input_ids are torch\.float32": {"input_ids": ids.float()},
        }
        return {said: partial(self.run, batch, **change) for said, change in changes.items()}


def in_a_checkpoint(run, reentrant):
    def again(hidden_states, **more):
        return checkpoint(lambda hidden: run(hidden_states=hidden, **more), hidden_states, use_reentrant=reentrant)

    return again


def selected_by(router, logits_RE):
    """What a router selects by, written down from its configuration; -inf in groups that are closed."""
    config = router.config
    if config.moe_router_score_function == "sigmoid":
        scores = logits_RE.sigmoid() + (router.expert_bias if config.moe_router_enable_expert_bias else 0.0)
    else:
        scores = logits_RE.softmax(-1) if config.moe_router_pre_softmax else logits_RE
    groups, open_groups = config.moe_router_num_groups, config.moe_router_group_topk
    if not groups:
        return scores
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(config.moe_router_topk // open_groups, dim=-1).values.sum(-1).topk(open_groups, dim=-1).indices
    is_open = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
