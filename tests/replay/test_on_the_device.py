"""What is on the device beside what is in NumPy: ids that take 16 bits without a sign."""

import numpy as np
import torch

import foreroute as fr
from foreroute.replay import Policy, TraceOnDevice


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
