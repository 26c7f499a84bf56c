"""A plan that is executed on layers which are called one by one, without the model around them."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from foreroute.ep.execution_ranks import MicroBatch
from foreroute.replay import ReplayRows


@contextmanager
def executing(placed, plan, counts_MLGE, rank, *, routed_R=None, real_R=None):
    """In its first micro-step, on rows of which all are tokens with a route by default."""
    micro_batch = MicroBatch(object(), counts_MLGE[0, :, rank], True)
    routed_R = torch.ones(1, dtype=torch.bool) if routed_R is None else routed_R
    real_R = torch.ones_like(routed_R) if real_R is None else real_R
    passes = SimpleNamespace(top=None, is_again=False)
    hooks = SimpleNamespace(passes=passes, execution=None, recomputing=lambda current, ran: nullcontext())
    with placed.execute(hooks, plan, counts_MLGE, [micro_batch], None) as execution:
        cells = execution.begin_pass(0, micro_batch.routes)
        ids_LRK = torch.where(routed_R, 0, -1)[None, :, None]
        rows = ReplayRows(ids_LRK, real_R=real_R, counted_R=real_R, cells=cells)
        passes.top = SimpleNamespace(rows=rows, with_grad=torch.is_grad_enabled())
        yield execution
