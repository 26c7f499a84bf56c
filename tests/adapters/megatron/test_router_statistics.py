"""Padding stays out of auxiliary losses and expert-bias counters, and the switch says whose selection they count."""

import pytest
import torch

from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.one_rank import GATES, MegatronSubject, model
from tests.replay.session_subject import batch_of, foreign, map_of, recorded, replayed, same, step

BATCH = batch_of(9, 5)
LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3}
LOSSES = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
    "moe_z_loss_coeff": 0.1,
}


class Unmasked(MegatronSubject):
    """Megatron is not told of padding."""

    def run(self, batch, **changes):
        return super().run(batch, **{"padding_mask": None, **changes})


@pytest.mark.slow
@on_ranks(1)
def test_losses_without_padding_are_megatrons_own_given_a_padding_mask():
    """Native routes, and padding left to the model: to the last bit what Megatron does with its mask."""
    masked, *unmasked = (subject(model("uniform", **LOSSES)) for subject in (MegatronSubject, Unmasked, Unmasked))
    native, trace = step(masked, None, BATCH), recorded(masked, BATCH)
    found, counted = step(unmasked[0], trace, BATCH, padding="native"), step(unmasked[1], None, BATCH)
    assert torch.equal(native[0], found[0])
    assert same(native[1], found[1]), "gradients differ"
    assert not same(native[1], counted[1]), "padding makes no difference; the check shows nothing"


@on_ranks(1)
def test_auxiliary_losses_count_what_the_switch_says():
    """The gradient that reaches a router's scores, against the loss's definition written down with dense counts."""
    for counts in ("native", "replayed"):
        on = Unmasked(model(**LOSS))
        trace, site = foreign(on.routed.spec, BATCH), on.routed.chunks[0].sites[0]
        with on.scores() as seen:
            replayed(on, trace, BATCH, counts=counts)
        scores_RE = seen[0][BATCH.real_BT].softmax(-1)
        by_switch = {switch: counted_E(trace, scores_RE, switch) for switch in ("native", "replayed")}
        wanted = (scores_RE.sum(0) * by_switch[counts]).sum() * 8 * 0.3 / (2 * len(scores_RE) ** 2)
        assert torch.allclose(logged_loss(site).double(), wanted, rtol=1e-5), counts
        assert not torch.equal(*by_switch.values())


@on_ranks(1)
def test_expert_bias_counts_what_the_switch_says_and_no_padding():
    native, given = "native", "replayed"
    for recompute, counts in (("none", native), ("none", given), ("uniform", given), ("selective", native)):
        on = Unmasked(model(recompute, **GATES["sigmoid with bias"]))
        trace, router = foreign(on.routed.spec, BATCH), on.routers[0]
        with on.scores() as seen:
            step(on, trace, BATCH, counts=counts)
        wanted_E = counted_E(trace, seen[0][BATCH.real_BT], counts).float()
        assert torch.equal(router.local_tokens_per_expert, wanted_E), f"{recompute}, {counts}"
        with torch.no_grad():
            replayed(on, trace, BATCH, counts=counts)
        assert torch.equal(router.local_tokens_per_expert, wanted_E), "a forward-only pass was counted"


def counted_E(trace, scores_RE, counts):
    """Assignments in the first routed layer to each expert: those of the trace, or those of the largest scores."""
    if counts == "replayed":
        return torch.from_numpy(map_of(trace, BATCH, 0).sum((0, 1)))
    return torch.bincount(scores_RE.topk(2).indices.reshape(-1), minlength=8)


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
