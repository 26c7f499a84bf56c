"""What is on the device beside what is in NumPy: bins of margins, and ids that take 16 bits without a sign."""

from types import SimpleNamespace

import numpy as np
import torch

import foreroute as fr
from foreroute.core.selection import Scores
from foreroute.mismatch import margin_histogram
from foreroute.replay import Policy, ReplayRows, Telemetry, TraceOnDevice
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


def test_the_highest_experts_of_the_largest_models_are_replayed():
    sizes, ids = [(40_000, 2), (65_535, 1)], [[[39_999, 1], [65_534, -1]], [[5, 32_768], [32_767, -1]]]
    spec = fr.RoutingSpec.of_sizes([fr.RoutedLayer(0), fr.RoutedLayer(1)], sizes)
    # the second sequence has no route
    trace = fr.RoutingTrace.from_sequences(spec, [[1, 2], [3]], [ids, np.full((1, 2, 2), -1)])
    rows = TraceOnDevice(trace, torch.device("cpu")).gather(
        torch.tensor([0, 1, -1, 2]), Policy("native", "native", "native", telemetry=False)
    )
    assert rows.ids_LRK.transpose(0, 1).tolist() == [*ids, *[[[-1, -1]] * 2] * 2]
    assert not rows.is_complete
