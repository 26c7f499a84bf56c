"""How often the host waits for the device in a planned cell, on a device that stands in for a GPU and counts."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.ep import BatchRows, dispatch
from foreroute.errors import ReplayError
from foreroute.replay.rows import joined_to_device
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from tests.ep.transfer.plans import static_plan


def waits_of_a_cell(rank, is_spoilt):
    """Where the host waits in the forward of a layer whose counts were known ahead."""
    model = tiny("gpt_oss")
    routed = hf.attach(model)
    with routed.record() as recording, torch.no_grad():
        model(torch.arange(1, 17).view(2, 8))
    trace = recording.trace()
    placed = hf.distribute(model, timeout_s=20)
    rows = BatchRows.replayed(trace, np.arange(1, 17).reshape(2, 8))
    counts_MLGE = rows.routed_LE[None, :, None].astype(np.int32)
    placed.begin_step(0, static_plan(counts_MLGE), counts_MLGE, [rows])
    layer = placed.layers[0]
    ids_NK = torch.from_numpy(trace.expert_ids_NLK[:, 0].astype(np.int64))
    with other_device() as device, torch.no_grad(), patch.object(dispatch, "expand", SPOILT[is_spoilt]):
        layer.module.to(DEVICE)
        given = [each.to(DEVICE) for each in (torch.ones(16, 32), ids_NK, torch.ones(16, routed.spec.top_k))]
        device.reads.clear()
        with pytest.raises(ReplayError, match="layer 1 was not executed"), placed.executing(0):
            layer(*given)
    return dict(device.reads)


def waiting(segments, sizes, device):
    """As `expand`, with a size that the device has to tell."""
    start_B, length_B = joined_to_device(segments, device).unbind(1)
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    rows = shift_B.repeat_interleave(length_B)
    return (rows + torch.arange(len(rows), device=device)).split(list(sizes))


SPOILT = {False: dispatch.expand, True: waiting}


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_planned_cell_waits_for_nothing(workers, is_spoilt):
    """The control waits once, for the size that `expand` knows."""
    (reads,) = workers(1).run(waits_of_a_cell, is_spoilt)
    assert sum(reads.values()) == (1 if is_spoilt else 0), reads
