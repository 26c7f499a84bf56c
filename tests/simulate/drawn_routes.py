"""Routes of every token of a drawn step, with exactly its counts: for tests that look at tokens."""

import numpy as np


def routes_of(step, micro_step, layer):
    """The experts of every token of one cell: int32 [N, K], pairwise distinct in a row; int32 [N], their source ranks.

    Systematic sampling over an order of experts of each sequence: beyond the counts, picks are as good as independent.
    """
    here_S, rng, cells = step.micro_step_S == micro_step, np.random.default_rng([micro_step, layer]), []
    rows_S, counts_SLE = step.rows_S[here_S], step.sequence_counts(micro_step, micro_step + 1)
    for rows, need_E in zip(rows_S, counts_SLE[:, layer], strict=True):
        order = rng.permutation(len(need_E))
        # the picks of an expert follow each other and are no more than the rows: no two of them fall into one row
        cells.append(np.repeat(order, need_E[order]).reshape(step.workload.top_k, rows).T)
    return np.concatenate(cells).astype(np.int32), np.repeat(step.rank_S[here_S], rows_S)
