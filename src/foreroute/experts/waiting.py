"""Collective calls of the model that do not come back, told in the words of the cell that they belong to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from foreroute.transfer.exchange import lost


@contextmanager
def answered(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Make a collective call in this context.

    Args:
        what: the call in words.
        group: on which it is made.

    Raises:
        TransferError: when a rank is gone, or does not answer within the group's timeout.
    """
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        raise lost(what, dist.get_rank(group), error, time.monotonic() - begun) from error
