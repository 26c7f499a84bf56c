"""Rows without a route and rows of padding, under each policy: what is executed, and what counts, token by token.

Telemetry, margins and counts are held against a recount on the host of what each router saw and would have done.
"""

import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.replay import ReplayCounts
from tests.replay.session_subject import (
    batch_of,
    foreign,
    map_of,
    prepared,
    recorded,
    refuses,
    replayed,
    require_followed,
    same,
    step,
)
from tests.roundings import require_rounded

BATCH = batch_of()
UNPADDED = batch_of(9, 9, 9)  # Megatron's own bias of experts fails on a mask of padding
LASTS = [(s, length - 1) for s, length in enumerate(BATCH.lengths)]
"""Absent in all cases, as engines give them."""
ABSENT = {"none": [], "gap": [(0, 2), (0, 3), (2, 0)], "tail": [(0, 7), (1, 4)], "all": [(0, p) for p in range(9)]}


def mask_of(absent):
    """By hand: a token counts while no row before it is absent."""
    mask = torch.zeros_like(BATCH.real_BT)
    for s, length in enumerate(BATCH.lengths):
        for t in range(length):
            mask[s, t] = not any((s, p) in absent for p in range(t))
    return mask


def check_own_routes_change_no_bit_and_others_are_followed(framework):
    """Loss and gradients of the model without replay; every router has a gradient under others."""
    usual, *others = framework.gates
    cases = [(usual, recompute, BATCH) for recompute in framework.recomputations]
    for gate, recompute, batch in cases + [(gate, framework.recomputations[-1], UNPADDED) for gate in others]:
        on = framework.built(gate, recompute)
        native = step(on, None, batch)
        own = step(on, recorded(on, batch), batch, padding="native")
        assert torch.equal(own[0], native[0]), (gate, recompute)
        assert same(own[1], native[1]), (gate, recompute)
        trace = foreign(on.routed.spec, batch)
        with on.given() as given:
            loss, _ = step(on, trace, batch)
        require_followed(given, trace, batch)
        other = foreign(on.routed.spec, batch, seed=2)
        with pytest.raises(AssertionError, match="follow"):  # the control
            require_followed(given, other, batch)
        assert not torch.equal(loss, native[0]), gate
        assert all(router.weight.grad.any() for router in on.routers), gate


def check_rows_without_a_route_are_routed_by_the_model_and_others_as_given(framework):
    usual, *others = framework.gates
    on = framework.built(usual)
    cases = [(on, name, missing) for name in ABSENT for missing in ("native", "drop")]
    for on, name, missing in cases + [(framework.built(gate), "gap", "native") for gate in others]:
        absent = ABSENT[name]
        trace = foreign(on.routed.spec, BATCH, absent=absent + LASTS)
        for telemetry in (False, True):
            with on.routed.replay(trace, missing=missing, telemetry=telemetry) as session, on.given() as given:
                with on.scores() as scores:
                    on.run(BATCH)
                mask_BT = session.loss_mask_BT
            assert torch.equal(mask_BT, mask_of(absent) if missing == "drop" else BATCH.real_BT), name
            for each in given:
                wanted = map_of(trace, BATCH, each.column)
                own = torch.zeros(wanted.shape, dtype=torch.bool)
                top_k = trace.spec.sizes_L[each.column][1]
                own.scatter_(-1, scores[each.column].topk(top_k, dim=-1).indices, True)
                wanted = np.where(wanted.any(-1, keepdims=True), wanted, own.numpy())
                real = BATCH.real_BT.numpy()
                assert np.array_equal(each.map_BTE[real], wanted[real]), (name, missing)


def check_by_default_missing_rows_are_refused(framework):
    on = framework.built()
    for name, said in (
        ("gap", r"sequence 0 .*no route.*position 2"),
        ("tail", r"sequence 0 .*no route.*position 7"),
        ("all", r"sequence 0 .*no route.*position 0"),
    ):
        trace = foreign(on.routed.spec, BATCH, absent=ABSENT[name] + LASTS)
        refuses(BatchMismatchError, said, lambda trace=trace: replayed(on, trace, BATCH))
    with on.routed.replay(foreign(on.routed.spec, BATCH, absent=LASTS)) as session:
        on.run(BATCH)
        assert torch.equal(session.loss_mask_BT, BATCH.real_BT)


def check_dropping_without_reading_the_mask_is_no_silent_no_op(framework):
    on = framework.built()
    gaps = foreign(on.routed.spec, BATCH, absent=ABSENT["gap"] + LASTS)
    refuses(ReplayError, r"nobody read.*mask", lambda: replayed(on, gaps, BATCH, missing="drop"))
    replayed(on, foreign(on.routed.spec, BATCH, absent=LASTS), BATCH, missing="drop")
    with on.routed.replay(gaps, missing="drop") as session:
        with pytest.raises(ReplayError, match=r"before.*forward"):
            _ = session.loss_mask_BT
        for _ in range(2):
            on.run(BATCH)
            assert session.loss_mask_BT.any()
            session.loss_mask_BT.zero_()  # which changes nothing but itself


def check_padding_is_spread_over_experts_and_real_rows_go_where_they_went(framework):
    """Neither counted nor given weights nor in the loss."""
    for gate in framework.gates:
        on = framework.built(gate)
        trace, real = foreign(on.routed.spec, BATCH), BATCH.real_BT.numpy()
        losses, counts = {}, {}
        for padding in ("native", "spread"):
            with on.given() as given, on.routed.replay(trace, padding=padding, telemetry=True) as session:
                losses[padding] = on.loss(BATCH)
            require_followed(given, trace, BATCH)
            counts[padding] = session.agreement().shared_L, session.expert_counts_LE()
            assert torch.equal(session.loss_mask_BT, BATCH.real_BT)
            assert counts[padding][1].sum() == trace.num_rows * trace.spec.picks_L.sum()
            loads = [each.map_BTE[~real].sum(0)[: trace.spec.sizes_L[each.column][0]] for each in given]
            assert all((load.max() - load.min() <= 1) == (padding == "spread") for load in loads), (gate, loads)
        assert all(map(np.array_equal, counts["native"], counts["spread"]))
        # experts are given other numbers of rows, for which a processor may add up in another order
        require_rounded(losses["spread"], losses["native"])


GAPS = [(0, 2), (0, 3), (2, 0)]


def recount(scores, trace):
    """Per layer (scores [N, E], own picks [N, K], replayed picks [N, K]), of the scores of rows that have a route."""
    layers = []
    for layer, (scores_NE, (_, top_k)) in enumerate(zip(scores, trace.spec.sizes_L, strict=True)):
        own_NK = np.argsort(-scores_NE, axis=-1, kind="stable")[:, :top_k]
        layers.append((scores_NE, own_NK, trace.expert_ids_NLK[trace.valid_N, layer, :top_k].astype(int)))
    return layers


def check_telemetry_is_what_a_recount_finds_and_counts_are_of_the_selection_that_the_switch_names(framework):
    """Rows of padding are in neither."""
    for gate in framework.gates:
        on = framework.built(gate)
        for absent, counts in (([], "native"), (GAPS, "native"), ([], "replayed")):
            trace = foreign(on.routed.spec, BATCH, absent=absent)
            options = {"missing": "native", "padding": "spread", "telemetry": True, "counts": counts}
            seen = ReplayCounts()
            with on.scores() as scores, on.routed.listening(seen), on.routed.replay(trace, **options) as session:
                on.run(BATCH)
            layers = recount([scores_BTE[BATCH.real_BT][trace.valid_N].numpy() for scores_BTE in scores], trace)
            require_agreement(session.agreement(), trace, layers)
            require_counts(seen, trace, layers)
            if not absent:
                picked = [own if counts == "native" else ids for _, own, ids in layers]
                expected = [np.bincount(each.reshape(-1), minlength=trace.spec.num_experts) for each in picked]
                assert np.array_equal(session.expert_counts_LE(), expected), counts


def require_counts(seen, trace, layers):
    differing = sum(set(a) != set(b) for _, own, ids in layers for a, b in zip(own, ids, strict=True))
    rows = int(trace.valid_N.sum())
    expected = {"rows": rows, "decisions": rows * len(layers), "native_differing_decisions": differing}
    obeyed = {"differing_rows": 0, "differing_decisions": 0}
    assert {name: int(value) for name, value in seen.sums.items()} == obeyed | expected


def check_experts_that_a_router_returns_against_the_replay_are_counted(framework):
    """The selection obeys, and what comes out of the router behind it names other experts in every row of a layer."""
    on, trace = prepared(framework)
    router = on.routed.chunks[0].routers[1]
    rows, found = trace.num_rows, []
    for disobeys in (False, True):
        counts = ReplayCounts()
        with pytest.MonkeyPatch.context() as patch, on.routed.listening(counts), on.routed.replay(trace):
            if disobeys:
                select = router.select
                patch.setattr(router, "select", lambda *args, **kwargs: other_experts(select(*args, **kwargs), on))  # noqa: B023
            on.run(BATCH)
        found.append([int(counts.sums[name]) for name in ("rows", "differing_rows", "differing_decisions")])
    assert found == [[rows, 0, 0], [rows, rows, rows]]


def other_experts(output, on):
    """What a router returned, with each expert id or column of experts moved on by one."""
    return tuple(
        (part + 1) % on.routed.spec.num_experts if part.dtype == torch.int64 else part.roll(1, -1) for part in output
    )


def require_agreement(seen, trace, layers):
    num_layers, num_rows = trace.spec.num_layers, int(trace.valid_N.sum())
    picks_L = np.array([top_k for _, top_k in trace.spec.sizes_L])
    shared = np.array([[len(set(a) & set(b)) for a, b in zip(own, ids, strict=True)] for _, own, ids in layers])
    differs = shared < picks_L[:, None]
    first = differs[:, differs.any(0)].argmax(0)
    assert seen.rows == num_rows
    assert np.array_equal(seen.picks_L, picks_L)
    assert np.array_equal(seen.shared_L, shared.sum(1))
    assert np.array_equal(seen.differing_L, differs.sum(1))
    assert np.array_equal(seen.by_differing_layers, np.bincount(differs.sum(0), minlength=num_layers + 1))
    assert np.array_equal(seen.first_differing_L, np.bincount(first, minlength=num_layers))
    assert seen.overlap_L == pytest.approx(shared.mean(1) / picks_L)


def margins_of(scores, top_k):
    ordered = -np.sort(-scores, axis=-1)
    return ordered[:, top_k - 1] - ordered[:, top_k]


def check_recorded_margins_are_the_gap_to_the_best_expert_that_could_have_been_picked(framework):
    """With groups, an expert of a closed one could not. Under replay too, where no router has to choose."""
    for gate, is_replayed in itertools.product(framework.gates, (False, True)):
        on = framework.built(gate)
        forced = on.routed.replay(foreign(on.routed.spec, BATCH), padding="spread") if is_replayed else nullcontext()
        with on.scores() as scores, forced, on.routed.record(margins=True) as recording, torch.no_grad():
            on.run(BATCH)
        for column, (scores_BTE, (_, top_k)) in enumerate(zip(scores, on.routed.spec.sizes_L, strict=True)):
            margins = margins_of(scores_BTE[BATCH.real_BT].numpy(), top_k)
            assert (margins > 0).all(), gate
            seen = recording.margins_NL()[:, column]
            assert np.allclose(seen, margins, rtol=1e-4, atol=1e-7), gate
            if on.selects_by_logits:  # one subtraction of what is known to the bit
                narrow = scores_BTE[BATCH.real_BT].float().numpy()
                assert np.array_equal(seen, margins_of(narrow, top_k)), gate


def check_native_picks_are_recorded_under_replay_with_how_far_they_are_from_the_replayed_ones(framework):
    """In logits where a router selects by a softmax; an expert of a group that is out has none."""
    for gate in framework.gates:
        on = framework.built(gate)
        trace = foreign(on.routed.spec, BATCH, absent=GAPS)
        with on.scores() as scores, on.routed.replay(trace, missing="native"), on.routed.record(native=True) as native:
            on.run(BATCH)
        scores = [scores_BTE[BATCH.real_BT].double().numpy() for scores_BTE in scores]
        recorded, deficits = native.trace(), native.deficits_NL()
        assert deficits.shape == recorded.expert_ids_NLK.shape[:2] == (sum(BATCH.lengths), len(scores))
        assert not deficits[~trace.valid_N].any(), "a row without a route is the router's own"
        for layer, (scores_NE, own, ids) in enumerate(recount([each[trace.valid_N] for each in scores], trace)):
            picked = recorded.expert_ids_NLK[trace.valid_N, layer, : own.shape[1]]
            assert np.array_equal(np.sort(picked, -1), np.sort(own, -1)), gate
            last, least = (np.take_along_axis(scores_NE, each, -1).min(-1) for each in (own, ids))
            in_reach = np.isfinite(least) & (least != 0)  # of groups that are out scores are overwritten here
            seen = deficits[trace.valid_N, layer]
            assert np.array_equal(np.isnan(seen), ~in_reach), gate
            with np.errstate(divide="ignore", invalid="ignore"):
                ways = [last - least, np.log(last) - np.log(least)]
            if in_reach.all():  # and so the scores of every expert are there
                is_softmax = not on.selects_by_logits and np.allclose(scores_NE.sum(-1), 1, atol=1e-3)
                ways = ways[1:] if is_softmax else ways[:1]
            assert any(np.allclose(seen[in_reach], way[in_reach], rtol=1e-3, atol=1e-5) for way in ways), gate
            assert (seen[in_reach] > 0).any() or not in_reach.any(), gate


def check_micro_batches_add_up_to_the_batch_and_recomputation_counts_once(framework):
    for recompute in framework.recomputations:
        on, trace = prepared(framework, recompute=recompute)

        def telemetry(*numbers, on=on, trace=trace):
            with on.routed.replay(trace.select(list(numbers)), telemetry=True) as session:
                on.loss(BATCH.select(*numbers)).backward()
            return session

        whole, parts = telemetry(0, 1, 2), [telemetry(number) for number in range(3)]
        joined, expected = parts[0].agreement() + parts[1].agreement() + parts[2].agreement(), whole.agreement()
        assert joined.rows == expected.rows == trace.num_rows
        assert np.array_equal(joined.shared_L, expected.shared_L)
        assert np.array_equal(joined.first_differing_L, expected.first_differing_L)
        assert np.array_equal(sum(part.expert_counts_LE() for part in parts), whole.expert_counts_LE())
