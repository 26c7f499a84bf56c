"""What is on the device beside what is in NumPy: ids that take 16 bits without a sign."""

import numpy as np
import torch

import foreroute as fr
from foreroute.replay import Policy, TraceOnDevice
from foreroute.replay.indexers import IndexerRows
from foreroute.trace import INDEXER, DecisionStream, IndexerSpec
from foreroute.trace.streams import MOST_CHOICES


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


def test_choices_of_indexers_are_read_for_each_layer_and_head():
    """Where a query sees no more than it may choose, all that it sees."""
    rng, layers = np.random.default_rng(0), (fr.RoutedLayer(1), fr.RoutedLayer(4))
    trace = fr.RoutingTrace.unrouted(fr.RoutingSpec(8, 1, layers), [np.arange(9), np.arange(6)])
    counts, ids, expected = [], [], {}
    for row, position in enumerate(trace.positions_N.tolist()):
        for layer in range(2):
            units = [np.sort(rng.permutation(position + 1)[:3]) for _ in range(2)]
            expected[row, layer] = [[*each, *[-1] * (3 - len(each))] for each in units]
            counts.append(6 * (position > 2))
            ids += [np.sort(np.concatenate([units[0] * 2, units[1] * 2 + 1]))] if position > 2 else []
    counts_ND = np.array(counts).reshape(-1, 2)
    stream = DecisionStream.from_sets(MOST_CHOICES, counts_ND[:, 0] >= 0, counts_ND, np.concatenate(ids), layers=layers)
    there = TraceOnDevice(trace.with_stream(INDEXER, stream), torch.device("cpu"))
    row_R = [14, 3, -1, 0, 8, 2]
    rows = IndexerRows(IndexerSpec(3, layers, heads=2), there, torch.tensor(row_R), 9)
    for layer in range(2):
        assert rows.units_RHW(layer).tolist() == [expected.get((row, layer), [[-1] * 3] * 2) for row in row_R]
