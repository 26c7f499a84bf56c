"""Routes of every token of a drawn step, with exactly its counts: for tests that look at tokens."""

import numpy as np

from foreroute.simulate.workload import draw_cells


def sequence_counts(step, micro_step, layer):
    """int32 [sequences of the micro-step, E], assignments of each; a cell drawn alone is the same as in its step."""
    here_S = step.micro_step_S == micro_step
    # each sequence as a rank of its own
    alone_S = np.arange(here_S.sum() + 1)
    counts_SE = np.zeros((len(alone_S) - 1, step.workload.num_experts), np.int32)
    seed_ML, share_MLE = (one[micro_step, layer][None, None] for one in (step._seed_ML, step._share_MLE))
    sequences = step.prompt_S[here_S], step.rows_S[here_S], alone_S[:-1].astype(np.int32)
    draw_cells(seed_ML, share_MLE, alone_S[[0, -1]], *sequences, step.workload, counts_SE[None, None])
    return counts_SE


def routes_of(step, micro_step, layer):
    """The experts of every token of one cell: int32 [N, K], pairwise distinct in a row; int32 [N], their source ranks.

    Systematic sampling over an order of experts of each sequence: beyond the counts, picks are as good as independent.
    """
    here_S, rng, cells = step.micro_step_S == micro_step, np.random.default_rng([micro_step, layer]), []
    rows_S = step.rows_S[here_S]
    for rows, need_E in zip(rows_S, sequence_counts(step, micro_step, layer), strict=True):
        order = rng.permutation(len(need_E))
        # the picks of an expert follow each other and are no more than the rows: no two of them fall into one row
        cells.append(np.repeat(order, need_E[order]).reshape(step.workload.top_k, rows).T)
    return np.concatenate(cells).astype(np.int32), np.repeat(step.rank_S[here_S], rows_S)
