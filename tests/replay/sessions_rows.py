"""Rows without a route and rows of padding, under each policy: what is executed, and what counts, token by token."""

import numpy as np
import pytest
import torch

from foreroute.errors import BatchMismatchError, ReplayError
from tests.replay.session_subject import (
    batch_of,
    foreign,
    map_of,
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
        ("gap", "sequence 0 has no route at position 2"),
        ("tail", "sequence 0 has no route at position 7"),
        ("all", "sequence 0 has no route at position 0"),
    ):
        trace = foreign(on.routed.spec, BATCH, absent=ABSENT[name] + LASTS)
        refuses(BatchMismatchError, said, lambda trace=trace: replayed(on, trace, BATCH))
    with on.routed.replay(foreign(on.routed.spec, BATCH, absent=LASTS)) as session:
        on.run(BATCH)
        assert torch.equal(session.loss_mask_BT, BATCH.real_BT)


def check_dropping_without_reading_the_mask_is_no_silent_no_op(framework):
    on = framework.built()
    gaps = foreign(on.routed.spec, BATCH, absent=ABSENT["gap"] + LASTS)
    refuses(ReplayError, "nobody read the loss mask", lambda: replayed(on, gaps, BATCH, missing="drop"))
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
