"""Which selection the auxiliary loss and the counters count, against sums written out by hand."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import ReplayError
from tests.adapters.hf.model_runs import batch_of, random_routes, uneven, with_routes
from tests.roundings import require_rounded
from tests.tiers import grid

BATCH = batch_of(9, 6, 4)
KEPT = BATCH["attention_mask"].bool().reshape(-1)


def native_picks(routed, output):
    """Of the live logits, by layer, [R, K] of the rows that are no padding."""
    return [logits[KEPT].topk(routed.spec.top_k).indices for logits in output.router_logits]


def switch_loss(router_logits, ids, num_experts=8):
    """E · Σ_e f_e · P_e over rows of all layers that are no padding (Switch Transformer, arXiv 2101.03961, 4 to 6)."""
    probability = torch.cat([logits[KEPT].detach().double().softmax(-1) for logits in router_logits]).mean(0)
    picks = torch.cat(ids)
    assigned = torch.stack([(picks == expert).sum() for expert in range(num_experts)]) / len(picks)
    return num_experts * (assigned * probability).sum()


@pytest.mark.shows("Hugging Face", "auxiliary losses (`output_router_logits`), of native or of executed routes")
@pytest.mark.parametrize("counts", ["native", "replayed"])
@grid("family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"], quick=2)
def test_the_auxiliary_loss_counts_what_it_is_told_to(family, counts):
    _, routed, trace = with_routes(BATCH, family)
    with routed.replay(trace, telemetry=True, counts=counts), routed.record() as recording:
        output = routed.model(**BATCH, output_router_logits=True, labels=BATCH["input_ids"])
    executed = torch.from_numpy(recording.trace().expert_ids_NLK.astype(np.int64)).unbind(1)
    ids = {"replayed": executed, "native": native_picks(routed, output)}
    losses = {name: switch_loss(output.router_logits, ids[name]) for name in ids}
    require_rounded(output.aux_loss, losses[counts])
    assert (losses["native"] - losses["replayed"]).abs() > 1e-2, "the check must be able to see a difference"
    after = routed.model(**BATCH, output_router_logits=True)
    require_rounded(after.aux_loss, switch_loss(after.router_logits, native_picks(routed, after)))


def test_a_loss_that_cannot_be_told_is_refused():
    model, routed, trace = with_routes(BATCH)
    forward = model.forward

    def with_a_loss_of_its_own(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.aux_loss = output.logits.sum()
        return output

    model.forward = with_a_loss_of_its_own
    with pytest.raises(ReplayError, match=r"selects 0.*3 routers"), routed.replay(trace, counts="replayed"):
        model(**BATCH)


def test_picks_that_differ_between_layers_cannot_be_counted():
    model = uneven([(8, 2), (8, 3), (8, 1)], router_aux_loss_coef=0.1)  # which upstream counts with one K for all
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with pytest.raises(ReplayError, match=r"replay.*counts"), routed.replay(trace, counts="replayed"):
        model(**BATCH, output_router_logits=True, labels=BATCH["input_ids"])
