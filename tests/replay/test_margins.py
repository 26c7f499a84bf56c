"""Margins of live routers, on the device, fall into the bins that `margin_histogram` counts."""

from types import SimpleNamespace

import numpy as np
import torch

from foreroute.core.selection import Scores
from foreroute.mismatch import margin_histogram
from foreroute.replay import ReplayRows, Telemetry
from tests.traces import spec_of

MARGINS = [0.0, 1e-12, 1e-8, 3e-4, 0.5, 9.9, 1e3, float("inf"), -1e-9, -2.0]


def test_margins_of_any_size_are_counted_alike_and_no_numbers_in_no_bin():
    spec = spec_of(num_layers=1)
    margins = torch.tensor([[*MARGINS, float("nan")]])
    num_rows = len(MARGINS) + 1
    ids_LRK = torch.arange(spec.top_k).expand(1, num_rows, spec.top_k)
    ones = torch.ones(num_rows, dtype=torch.bool)
    telemetry = Telemetry([spec])
    scores = Scores(
        margins[..., None].expand(-1, -1, spec.top_k), torch.zeros(1, num_rows), torch.ones(1, dtype=torch.bool)
    )
    rows = ReplayRows(ids_LRK, real_R=ones, counted_R=ones)
    seen = SimpleNamespace(native_LRK=ids_LRK, executed_LRK=ids_LRK, scores=scores, rows=rows)
    telemetry.end_pass(0, None, seen)
    found = telemetry.agreement(0)
    assert found.margins_LB.tolist() == margin_histogram(np.array(MARGINS, np.float32)[:, None]).tolist()
    assert found.routing.rows - found.margins_LB.sum() == 1
