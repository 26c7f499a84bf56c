"""Padding stays out of auxiliary losses and expert-bias counters, and the switch says whose selection they count."""

import numpy as np
import pytest
import torch

from foreroute.errors import BatchMismatchError
from foreroute.layout import pad
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.replay.session_subject import Batch, map_of, same

LENGTHS = (9, 5)
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LOSSES = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3},
    "z_loss": {"moe_z_loss_coeff": 0.3},
    "both": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.2],
        "moe_z_loss_coeff": 0.1,
    },
}


@pytest.mark.slow
@on_ranks(1)
def test_losses_without_padding_are_megatrons_own_given_a_padding_mask():
    """Native routes, and padding left to the model: to the last bit what Megatron does with its mask."""
    for name, settings in LOSSES.items():
        for recompute in ("none", "uniform"):
            ids = on.tokens(lengths=LENGTHS)
            built, routed = on.attached(recompute, **settings)
            native = on.step(built, ids, lengths=LENGTHS, padding_mask=padding())
            trace = own_routes(routed, ids)
            built, routed = on.attached(recompute, **settings)
            with routed.replay(trace, padding="native"):
                replayed = on.step(built, ids, lengths=LENGTHS)
            assert torch.equal(native[0], replayed[0]), name
            assert same(native[1], replayed[1]), f"{name}, {recompute}: gradients differ"
            built, _ = on.attached(recompute, **settings)
            counted = on.step(built, ids, lengths=LENGTHS)
            assert not same(native[1], counted[1]), f"{name}: padding makes no difference; the check shows nothing"


@on_ranks(1)
def test_auxiliary_losses_count_what_the_switch_says():
    """The gradient that reaches a router's scores, against the loss's definition written down with dense counts."""
    for counts in ("native", "replayed"):
        built, routed, ids, trace = on.prepared(lengths=LENGTHS, **LOSSES["aux_loss"])
        site = routed.chunks[0].sites[0]
        seen = scores_of(site.module)
        with routed.replay(trace, counts=counts):
            built.zero_grad(set_to_none=True)
            on.forward(built, ids, lengths=LENGTHS)
        [logits_RE] = seen
        scores_RE = logits_RE.detach().softmax(-1)[real_R()]
        by_switch = {switch: counted_E(trace, ids, scores_RE, switch) for switch in ("native", "replayed")}
        wanted = (scores_RE.sum(0) * by_switch[counts]).sum() * 8 * 0.3 / (2 * len(scores_RE) ** 2)
        assert torch.allclose(logged_loss(site), wanted, rtol=1e-5), counts
        assert not torch.equal(*by_switch.values())


@on_ranks(1)
def test_expert_bias_counts_what_the_switch_says_and_no_padding():
    for recompute in ("none", "uniform", "selective"):
        for counts in ("native", "replayed"):
            built, routed, ids, trace = on.prepared(recompute, lengths=LENGTHS, **SIGMOID)
            site = routed.chunks[0].sites[0]
            seen = scores_of(site.module)
            with routed.replay(trace, counts=counts):
                on.step(built, ids, lengths=LENGTHS)
            biased_RE = (seen[-1].detach().sigmoid() + site.module.expert_bias)[real_R()]
            wanted_E = counted_E(trace, ids, biased_RE, counts).float()
            assert torch.equal(site.module.local_tokens_per_expert, wanted_E), f"{recompute}, {counts}"
            assert wanted_E.sum() == 2 * sum(LENGTHS)
            with torch.no_grad(), routed.replay(trace, counts=counts):
                on.forward(built, ids, lengths=LENGTHS)
            assert torch.equal(site.module.local_tokens_per_expert, wanted_E), "a forward-only pass was counted"


@pytest.mark.slow
@on_ranks(1)
def test_left_padding_is_told_by_a_layout():
    built, routed, ids, trace = on.prepared(lengths=LENGTHS)
    left = torch.stack([row.roll(on.WIDTH - length) for row, length in zip(ids, LENGTHS, strict=True)])
    layout = pad(trace.lengths, side="left", order="sbhd", to=on.WIDTH)
    for given in ((trace, layout), (routed.shard(trace, layout),)):
        with on.maps_given(routed) as maps, routed.replay(*given):
            on.forward(built, left)
        assert len(maps) == trace.spec.num_layers
        for column, map_BTE, _ in maps:
            wanted_BTE = map_of(trace, Batch(ids, LENGTHS), column)
            for s, length in enumerate(LENGTHS):
                assert np.array_equal(map_BTE[s, on.WIDTH - length :], wanted_BTE[s, :length])
    with pytest.raises(BatchMismatchError, match=r"padded.*layout"), routed.replay(trace):
        on.forward(built, left)


def padding():
    """Bool [B, T], True for padding, as Megatron takes it."""
    return torch.arange(on.WIDTH)[None] >= torch.tensor(LENGTHS)[:, None]


def real_R():
    """The router rows that are no padding: sequence first."""
    return ~padding().T.reshape(-1)


def counted_E(trace, ids, scores_RE, counts):
    """Assignments in the first routed layer to each expert: those of the trace, or those of the largest scores."""
    if counts == "replayed":
        return torch.from_numpy(map_of(trace, Batch(ids, LENGTHS), 0).sum((0, 1)))
    return torch.bincount(scores_RE.topk(2).indices.reshape(-1), minlength=8)


def own_routes(routed, ids):
    with routed.record() as recording, torch.no_grad():
        on.forward(routed.chunks[0].trunk, ids, lengths=LENGTHS, padding_mask=padding())
    trace = recording.trace()
    assert trace.lengths.tolist() == list(LENGTHS)
    return trace


def scores_of(router):
    seen = []
    gating = router.gating

    def watched(hidden):
        logits = gating(hidden)
        seen.append(logits.reshape(-1, logits.shape[-1]))
        return logits

    router.gating = watched
    return seen


def logged_loss(site):
    """The auxiliary loss that a forward attached to the router's weights, read off Megatron's own log of it."""
    try:
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker as tracker_of

        values = tracker_of()["load_balancing_loss"]["values"]
    except ImportError:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        values = get_moe_metrics_tracker().metrics["load_balancing_loss"].values
    value = values[site.layer.index].clone() * 0.3
    values.zero_()
    return value
