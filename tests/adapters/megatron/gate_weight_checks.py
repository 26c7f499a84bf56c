"""Gate weights recorded and replayed, margins, and what a recomputation does of all that."""

import numpy as np
import torch

from foreroute.core.selection import LayerPass
from foreroute.errors import TraceContentError
from foreroute.layout import pad
from tests.adapters.megatron import one_rank as on
from tests.traces import weighted


def check_its_own_weights_change_no_bit():
    for name, settings in on.ROUTINGS.items():
        built, routed, ids, trace, native = weighed(**settings)
        assert torch.equal(replayed(built, routed, trace, ids), native), name
        # a router's own weights may be rounded otherwise in another order of sequences; those of a trace are constants
        swapped = trace.select([1, 0])
        with routed.record(gate_weights=True) as recording:
            replayed(built, routed, swapped, ids.flip(0))
        assert np.array_equal(recording.trace().gate_weights_NLK, swapped.gate_weights_NLK), name


def check_other_weights_are_obeyed_and_no_gradient_reaches_a_router():
    for recompute in ("none", "uniform", "selective"):
        built, routed, ids, trace, native = weighed(recompute)
        other = weighted(trace, trace.gate_weights_NLK / 2)
        with routed.record(gate_weights=True) as recording, torch.no_grad():
            changed = replayed(built, routed, other, ids)
        assert np.array_equal(recording.trace().gate_weights_NLK, other.gate_weights_NLK)
        assert not torch.allclose(changed, native, atol=1e-4)
        with routed.replay(other, gate_weights=True):
            _, grads = on.step(built, ids)
        of_routers = [gradient for name, gradient in grads.items() if ".router." in name]
        assert not any(gradient.any() for gradient in of_routers), recompute
        assert any(gradient.any() for name, gradient in grads.items() if "experts" in name)
        with routed.replay(trace):
            _, live = on.step(built, ids)
        assert all(gradient.any() for name, gradient in live.items() if ".router." in name), "live weights have one"


def check_recomputed_layers_have_the_same_weights():
    steps = []
    for recompute in ("none", "uniform", "block", "selective"):
        built, routed, ids, trace, _ = weighed(recompute)
        with routed.replay(weighted(trace, trace.gate_weights_NLK[::-1].copy()), gate_weights=True):
            loss = on.forward(built, ids)
        built.zero_grad(set_to_none=True)
        loss.backward()
        steps.append((loss.detach(), on.gradients(built)))
    for loss, grads in steps[1:]:
        assert torch.equal(loss, steps[0][0])
        assert on.same(grads, steps[0][1])


def check_padding_and_rows_without_a_route_keep_their_own_weights():
    built, routed = on.attached()
    lengths = (on.WIDTH, 7)
    ids = on.tokens(lengths=lengths)
    with routed.record(gate_weights=True) as recording, torch.no_grad():
        native = on.forward(built, ids, lengths)
    trace = recording.rollout(ids, torch.arange(on.WIDTH) < torch.tensor(lengths)[:, None])
    assert not trace.valid_N.all()
    with routed.replay(trace, gate_weights=True, padding="native"), torch.no_grad():
        assert torch.equal(on.forward(built, ids, lengths), native)
    with routed.replay(trace, gate_weights=True), routed.record(gate_weights=True) as spread, torch.no_grad():
        on.forward(built, ids, lengths)
    assert (spread.trace().gate_weights_NLK > 0).all(), "padding goes where it is sent with the weights of the router"


def check_what_waits_in_a_queue_brings_its_weights():
    built, routed, ids, trace, _ = weighed()
    halved = weighted(trace, trace.gate_weights_NLK / 2)
    layout = pad(trace.lengths, side="right", order="sbhd")
    with_them, without = (routed.shard(halved, layout, gate_weights=switch) for switch in (True, False))
    assert with_them.nbytes - without.nbytes == 4 * trace.expert_ids_NLK.size
    assert torch.equal(replayed(built, routed, with_them, ids), replayed(built, routed, halved, ids))


def check_weights_that_there_are_not_are_refused_at_once():
    _, routed = on.attached()
    trace = on.foreign(routed.spec, on.tokens())
    layout = pad(trace.lengths, side="right", order="sbhd")
    on.refuses(TraceContentError, "no gate weights", lambda: routed.shard(trace, layout, gate_weights=True))
    for routes in (trace, routed.shard(trace, layout)):
        opening = routed.replay(routes, gate_weights=True)
        on.refuses(TraceContentError, "no gate weights", opening.__enter__)


def check_a_recomputation_keeps_nothing_anew():
    """Nobody reads it, and what runs is what the forward kept."""
    built, routed = on.attached("uniform")
    ids = on.tokens()
    asked = []
    choose = LayerPass.choose

    def noted(now, own):
        if own is not None:
            asked.append(0)
        return choose(now, own)

    LayerPass.choose = noted
    try:
        with routed.replay(on.foreign(routed.spec, ids), telemetry=True):
            loss = on.forward(built, ids)
            assert len(asked) == routed.spec.num_layers
            loss.backward()
    finally:
        LayerPass.choose = choose
    assert len(asked) == routed.spec.num_layers


def check_margins_are_the_gap_to_the_best_expert_that_could_have_been_picked():
    """By hand, of the router's own scores; with groups, an expert of a closed one could not."""
    for groups, open_groups in ((None, None), (4, 2)):
        settings = {"moe_router_num_groups": groups, "moe_router_group_topk": open_groups} if groups else {}
        built, routed = on.attached(moe_router_pre_softmax=True, moe_router_topk=2, **settings)
        ids = on.tokens()
        scores = []
        for site in routed.chunks[0].sites:
            keep_scores(site.module, scores)
        with routed.record(margins=True) as recording, torch.no_grad():
            on.forward(built, ids)
        for column, scores_RE in enumerate(scores):
            expected_R = np.array([margin_of(row, groups, open_groups) for row in scores_RE.double().tolist()])
            expected_R = expected_R.reshape(on.WIDTH, -1).T.reshape(-1)  # sequence first
            assert np.allclose(recording.margins_NL()[:, column], expected_R, rtol=1e-4, atol=1e-7)
            assert (expected_R > 0).all()


def check_margins_with_groups_of_several_picks():
    """Two picks in one of two groups: the sum of two that opens a group may leave the best expert of all outside."""
    built, routed = on.attached(
        moe_router_pre_softmax=True, moe_router_topk=2, moe_router_num_groups=2, moe_router_group_topk=1
    )
    with routed.record(margins=True) as recording, torch.no_grad():
        on.forward(built, on.tokens())
    assert (recording.margins_NL() >= 0).all()
    with routed.replay(recording.trace(), telemetry=True) as session, torch.no_grad():
        on.forward(built, on.tokens())
    assert session.agreement().margins_LB.sum() == on.tokens().numel() * routed.spec.num_layers


def check_tokens_may_be_overwritten_when_the_forward_is_over():
    built, routed = on.attached()
    ids = on.tokens(lengths=(on.WIDTH,))
    given = ids.clone()
    with routed.record() as recording, torch.no_grad():
        on.forward(built, given, lengths=(on.WIDTH,))
        given.zero_()
    assert recording.trace().tokens(0).tolist() == ids[0].tolist()


def weighed(recompute="none", **settings):
    """A model, attached, tokens, the routes and weights that it gives them, and its loss."""
    built, routed = on.attached(recompute, **settings)
    ids = on.tokens()
    with routed.record(gate_weights=True) as recording, torch.no_grad():
        loss = on.forward(built, ids)
    return built, routed, ids, recording.trace(), loss


def replayed(built, routed, routes, ids):
    with torch.no_grad():
        return on.replayed(built, routed, routes, ids, gate_weights=True)


def keep_scores(router, into):
    """Note the probabilities that a router selects by, at its first call."""
    gating = router.gating

    def noting(hidden):
        logits = gating(hidden)
        into.append(logits.view(-1, logits.shape[-1]).float().softmax(-1))
        return logits

    router.gating = noting


def margin_of(scores, groups, open_groups, top_k=2):
    size = len(scores) // (groups or 1)
    numbered = [sorted(scores[g * size : (g + 1) * size], reverse=True) for g in range(groups or 1)]
    ranked = sorted(numbered, key=lambda group: sum(group[: top_k // (open_groups or 1)]), reverse=True)
    left = sorted((score for group in ranked[: open_groups or 1] for score in group), reverse=True)
    return left[top_k - 1] - left[top_k]
