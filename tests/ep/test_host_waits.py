"""How often the host waits for the device in a planned cell, on a device that stands in for a GPU and counts."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.ep import dispatch
from foreroute.errors import ReplayError
from foreroute.replay.rows import joined_to_device
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from tests.ep import by_hand
from tests.ep.transfer.plans import static_plan

NUM_ROWS, TOP_K = 16, 2
ROWS = {
    "whole": torch.ones(NUM_ROWS, dtype=torch.bool),
    "last tokens": torch.arange(NUM_ROWS) % 8 < 7,
    "padding": torch.arange(NUM_ROWS) > 4,
}
"""Which have a route; those behind are real tokens, those before are not."""


def waits_of_a_cell(rank, of, is_spoilt):
    """Where the host waits in the forward of a layer, and how far its output is off where rows have a route."""
    model = tiny("gpt_oss")
    placed = hf.distribute(model, timeout_s=20)
    layer, generator = placed.layers[0], torch.Generator().manual_seed(0)
    ids_NK = torch.rand(NUM_ROWS, 8, generator=generator).argsort(-1)[:, :TOP_K]
    given = [torch.randn(NUM_ROWS, 32, generator=generator), ids_NK, torch.rand(NUM_ROWS, TOP_K, generator=generator)]
    routed_R, real_R = ROWS[of], torch.arange(NUM_ROWS) > (4 if of == "padding" else -1)
    counts_E = torch.bincount(ids_NK[routed_R].flatten(), minlength=8).numpy()
    counts_MLGE = np.tile(counts_E, (1, len(placed.layers), 1, 1)).astype(np.int32)
    with torch.no_grad():
        alone = layer(*given)
    found = []

    def run_one_layer():
        with by_hand.executing(placed, static_plan(counts_MLGE), counts_MLGE, rank, **masks):
            device.reads.clear()
            found.extend([layer(*given), dict(device.reads)])

    with other_device() as device, torch.no_grad(), patch.object(dispatch, "expand", SPOILT[is_spoilt]):
        layer.module.to(DEVICE)
        given = [each.to(DEVICE) for each in given]
        masks = {"routed_R": routed_R.to(DEVICE), "real_R": real_R.to(DEVICE)}
        with pytest.raises(ReplayError, match="layer 1 was not executed"):
            run_one_layer()
        out, reads = found[0].cpu(), found[1]
    return reads, float((out - alone)[routed_R].abs().max()), bool((out[~routed_R] == 0).all())


def waiting(segments, sizes, device):
    """As `expand`, with a size that the device has to tell."""
    start_B, length_B = joined_to_device(segments, device).unbind(1)
    shift_B = start_B - (length_B.cumsum(0) - length_B)
    rows = shift_B.repeat_interleave(length_B)
    return (rows + torch.arange(len(rows), device=device)).split(list(sizes))


SPOILT = {False: dispatch.expand, True: waiting}


@pytest.mark.parametrize(("of", "is_spoilt"), [*((of, False) for of in ROWS), ("whole", True)])
def test_a_planned_cell_waits_for_nothing(workers, of, is_spoilt):
    """Nor do rows that are not sent have it wait. The control waits once, for the size that `expand` knows."""
    ((reads, error, are_zeros),) = workers(1).run(waits_of_a_cell, of, is_spoilt)
    assert sum(reads.values()) == (1 if is_spoilt else 0), reads
    assert error < 1e-5
    assert are_zeros
