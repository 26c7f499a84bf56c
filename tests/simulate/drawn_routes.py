"""Routes of every token of a drawn step, with exactly its counts: for tests that look at tokens."""

import numpy as np

from foreroute.kernels import kernel, next_below
from foreroute.simulate.workload import draw_sequences
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace


def sequence_counts(step, micro_step, layer):
    """int32 [sequences of the micro-step, E], assignments of each; a cell drawn alone is the same as in its step."""
    here_S = step.micro_step_S == micro_step
    counts_SE = np.empty((here_S.sum(), step.workload.num_experts), np.int32)
    cell = step._seed_ML[micro_step, layer], step._share_MLE[micro_step, layer]
    draw_sequences(*cell, step.prompt_S[here_S], step.rows_S[here_S], step._rule, counts_SE)
    return counts_SE


def routes_of(step, micro_step, layer):
    """The experts of every token of one cell: int32 [N, K], pairwise distinct in a row; int32 [N], their source ranks.

    Beyond the counts, the experts of a token are as good as independent, and tokens follow in no particular order.
    """
    here_S = step.micro_step_S == micro_step
    rows_S = step.rows_S[here_S]
    ids_NK = np.empty((int(rows_S.sum()), step.workload.top_k), np.int32)
    seed = np.random.default_rng([micro_step, layer]).integers(0, 2**64, dtype=np.uint64)
    draw_rows(seed, sequence_counts(step, micro_step, layer), rows_S, step.workload.top_k, ids_NK)
    return ids_NK, np.repeat(step.rank_S[here_S], rows_S)


def trace_of(step):
    """A small step as a trace of S sequences; its `micro_step_S` and `rank_S` are the packing."""
    load = step.workload
    cells = [[routes_of(step, m, la)[0] for la in range(load.num_layers)] for m in range(load.num_micro_steps)]
    ids_NLK = np.concatenate([np.stack(layers, axis=1) for layers in cells])
    spec = RoutingSpec(load.num_experts, load.top_k, tuple(RoutedLayer(la) for la in range(load.num_layers)))
    routes = np.split(ids_NLK, np.cumsum(step.rows_S)[:-1])
    return RoutingTrace.from_sequences(spec, [np.zeros(len(r), np.int32) for r in routes], routes)


@kernel
def draw_rows(seed, counts_SE, rows_S, top_k, ids_NK):
    """Routes with given counts: row by row, each expert with probability (what it still needs) / (rows left).

    Systematic sampling over a fresh order of experts in every row hits these probabilities exactly, never picks an
    expert twice, and takes one that needs all rows left with certainty, so the counts always come out.
    """
    state = np.full(1, seed, np.uint64)
    order = np.empty(counts_SE.shape[1], np.int32)
    row = 0
    for s in range(len(rows_S)):
        need_E = counts_SE[s].copy()
        size = 0
        for e in range(len(need_E)):
            if need_E[e]:
                order[size] = e
                size += 1
        # what all experts still need is `left` * top_k, and none needs more than `left`: so a threshold every `left` of
        # the running sum is passed top_k times, and by no expert twice
        for left in range(rows_S[s], 0, -1):
            threshold = next_below(state, left)
            upto, k, i = 0, 0, 0
            while k < top_k:
                j = i + next_below(state, size - i)
                e = order[j]
                order[j] = order[i]
                order[i] = e
                upto += need_E[e]
                if upto > threshold:
                    threshold += left
                    ids_NK[row, k] = e
                    k += 1
                    need_E[e] -= 1
                    if need_E[e] == 0:
                        # the last expert of the list takes its position and has not had its turn
                        size -= 1
                        order[i] = order[size]
                        continue
                i += 1
            row += 1
