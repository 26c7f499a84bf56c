"""How often the host waits for the device in a planned cell, on a device that stands in for a GPU and counts."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.ep import BatchRows
from foreroute.ep import layer as routed_layer
from foreroute.errors import ReplayError
from foreroute.testing.models import tiny
from foreroute.testing.ranks import Workers
from tests.ep.planned import static_plan


def waits_of_a_cell(rank, is_spoilt):
    """Where the host waits in the forward of a layer whose counts were known ahead."""
    from benchmarks.gpu.stand_in import Counting, StandInTensor, move_to_stand_in

    model = tiny("gpt_oss")
    routed = hf.attach(model)
    with routed.record() as recording, torch.no_grad():
        model(torch.arange(1, 17).view(2, 8))
    trace = recording.trace()
    placed = hf.distribute(model, timeout_s=20)
    rows = BatchRows.replayed(trace, np.arange(1, 17).reshape(2, 8))
    counts_MLGE = rows.routed_LE[None, :, None].astype(np.int32)
    placed.begin_step(0, static_plan(counts_MLGE), counts_MLGE)
    layer = placed.layers[0]
    move_to_stand_in(layer.shards.module)
    ids_NK = StandInTensor(torch.from_numpy(trace.expert_ids_NLK[:, 0].astype(np.int64)))
    given = StandInTensor(torch.ones(16, 32)), ids_NK, StandInTensor(torch.ones(16, routed.spec.top_k))
    with (
        pytest.raises(ReplayError, match="layer 1 was not executed"),
        placed.executing(0, rows),
        Counting() as counting,
        torch.no_grad(),
        patch.object(routed_layer, "expand", SPOILT[is_spoilt]),
    ):
        counts = counting.count(lambda: layer(*given))
    return counts.launches, counts.waits


def waiting(runs, device):
    """As `expand`, with a size that the device has to tell."""
    start_B, length_B = torch.from_numpy(runs).to(device, non_blocking=True).unbind(1)
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    rows = shift_B.repeat_interleave(length_B)
    return rows + torch.arange(len(rows), device=device)


SPOILT = {False: routed_layer.expand, True: waiting}


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_planned_cell_waits_for_nothing(is_spoilt):
    """The control waits for the three sizes that `expand` knows."""
    group = Workers(1)  # of its own: its process takes the stand-in for an accelerator
    try:
        ((launches, waits),) = group.run(waits_of_a_cell, is_spoilt)
    finally:
        group.close()
    assert launches > 40
    assert len(waits) == (3 if is_spoilt else 0), waits
