"""What `RootRows` must count, of a trace and of what routers pick natively on it: row by row, on the host."""

import numpy as np

from foreroute.mismatch import RootCounts


def beside(native_NLK, trace):
    """Bool [4, N, L]: roots, natives that are the row before, and behind, and rows that repeat."""
    ids_NLK, result = np.sort(trace.expert_ids_NLK, -1), np.zeros((4, *native_NLK.shape[:2]), bool)
    for row in range(trace.num_rows):
        for layer in range(trace.spec.num_layers):
            own = native_NLK[row, layer].tolist()
            if trace.valid_N[row]:
                result[0, row, layer] = own != ids_NLK[row, layer].tolist()
            for number, other in ((1, row - 1), (2, row + 1)):
                sequence = np.searchsorted(trace.offsets, row, side="right") - 1
                first, last = trace.offsets[sequence : sequence + 2]
                if first <= other < last and trace.valid_N[[row, other]].all():
                    result[number, row, layer] = own == ids_NLK[other, layer].tolist()
                    if number == 1:
                        same = trace.expert_ids_NLK[row, layer] == trace.expert_ids_NLK[other, layer]
                        result[3, row, layer] = same.all()
    return result


def root_counts(native_NLK, trace):
    """The counts of a whole batch."""
    roots, *others = beside(np.sort(native_NLK, -1), trace)
    return RootCounts(*(each.sum(1) for each in (roots, *others)), roots.sum(0), trace.lengths)
