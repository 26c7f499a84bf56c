"""A small model on one rank, called by hand: what the checks of sessions, exactness and refusals share."""

import contextlib
import re

import numpy as np
import pytest
import torch

from foreroute import RoutingTrace
from foreroute.adapters import megatron
from tests.adapters.megatron import model_chunks
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import RECOMPUTE_SETTINGS, VOCABULARY, initialize
from tests.adapters.megatron.training_step import gradients, watching
from tests.replay.session_subject import Batch, Given, require_followed

ROUTINGS = {
    "softmax after": {},
    "softmax before": {"moe_router_pre_softmax": True},
    "softmax before, scaled": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "softmax before, one pick": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "softmax before, of groups": {
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid with bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "sigmoid with bias, of groups, scaled": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "double precision": {"moe_router_dtype": "fp64"},
    "parameters' precision": {"moe_router_dtype": None},
    "input jitter": {"moe_input_jitter_eps": 0.01},
    "roomy capacity": {"moe_expert_capacity_factor": 4.0, "moe_token_drop_policy": "position"},
}
WIDTH = 12


def model(recompute="none", seed=0, layers=3, **settings):
    """A model in training mode. The expert bias, where it has one, is not zero."""
    settings = {"moe_layer_freq": [0, 1, 1], **settings} if layers == 3 else settings
    initialize(Cell())
    settings |= RECOMPUTE_SETTINGS[recompute]
    [built] = model_chunks.build(Cell(layers=layers, settings=tuple(settings.items())), seed)
    for name, buffer in built.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return built.train()


def tokens(seed=0, lengths=(WIDTH, WIDTH)):
    drawn = torch.randint(1, VOCABULARY, (len(lengths), WIDTH), generator=torch.Generator().manual_seed(seed))
    for row, length in zip(drawn, lengths, strict=True):
        row[length:] = 0
    return drawn


def forward(built, ids, lengths=(WIDTH, WIDTH), **more):
    """The mean loss of the tokens that are no padding, drawn with the same random numbers every time."""
    torch.manual_seed(7)
    positions = torch.arange(WIDTH).expand_as(ids)
    causal = torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu(1)[None, None]
    losses = built(ids, positions, causal, labels=ids.roll(-1, 1), **more)
    kept = positions < torch.tensor(lengths)[:, None]
    return (losses * kept).sum() / kept.sum()


def step(built, ids, **more):
    built.zero_grad(set_to_none=True)
    loss = forward(built, ids, **more)
    loss.backward()
    return loss.detach(), gradients([built])


def recorded(routed, ids, **more):
    with routed.record() as recording, torch.no_grad():
        forward(routed.chunks[0].trunk, ids, **more)
    return recording.trace()


def foreign(spec, ids, seed=3, lengths=(WIDTH, WIDTH), complete=True):
    rng = np.random.default_rng(seed)
    rows = [length - (not complete) for length in lengths]
    routes = [np.argsort(rng.random((n, spec.num_layers, spec.num_experts)), -1)[..., : spec.top_k] for n in rows]
    kept = [row[:length].numpy() for row, length in zip(ids, lengths, strict=True)]
    return RoutingTrace.from_sequences(spec, kept, routes)


def attached(recompute="none", seed=0, **settings):
    built = model(recompute, seed, **settings)
    return built, megatron.attach(built)


def prepared(recompute="none", lengths=(WIDTH, WIDTH), **settings):
    built, routed = attached(recompute, **settings)
    ids = tokens(lengths=lengths)
    return built, routed, ids, foreign(routed.spec, ids, lengths=lengths)


def replayed(built, routed, routes, ids, **policy):
    with routed.replay(routes, **policy):
        return forward(built, ids)


@contextlib.contextmanager
def maps_given(routed):
    """A list of what the dispatchers of MoE layers are given, forwards and recomputations in turn."""
    given, blocks = [], [site.block for chunk in routed.chunks for site in chunk.sites]

    def note(column, hidden, routing_map, probs):
        shape = (*hidden.shape[:2], -1)
        map_BTE, weights_BTE = (x.view(shape).transpose(0, 1) for x in (routing_map, probs))
        given.append(Given(column, map_BTE.numpy().copy(), weights_BTE.float().numpy().copy()))

    with watching(dict(enumerate(blocks)), note):
        yield given


def assert_followed(given, trace, lengths=(WIDTH, WIDTH)):
    """Every dispatcher got the routes of the trace, once."""
    assert len(given) == trace.spec.num_layers
    require_followed(given, trace, Batch(torch.zeros(len(lengths), WIDTH), lengths))


def refuses(kind, said, call):
    with pytest.raises(kind, match=re.escape(said)):
        call()
