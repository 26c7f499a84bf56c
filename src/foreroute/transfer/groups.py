"""Process groups of our own, beside those that the model communicates on."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


def own_group(
    *along: dist.ProcessGroup, ranks: list[int] | None = None, timeout_s: float, backend: str | None = None
) -> dist.ProcessGroup:
    """Make a new group.

    Args:
        along: groups that join its ranks; a collective call of each of them, one after the other. With two, as of rows
            and columns, every rank of the new group is reached by one step in each. The whole world by default.
        ranks: global ranks of the group, ascending, with this one among them; those of `along` by default.
        timeout_s: of its collectives, in seconds.
        backend: that of the default group by default.
    """
    timeout = timedelta(seconds=timeout_s)
    if not along and ranks is None:
        everyone: dist.ProcessGroup = dist.new_group(timeout=timeout, backend=backend)
        return everyone
    for group in along or (None,):
        _level(group)
    members = dist.get_process_group_ranks(along[-1]) if ranks is None else ranks
    made: dist.ProcessGroup = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True)
    return made


def _level(group: dist.ProcessGroup | None) -> None:
    """Let all ranks be in as many groups as the one that is in most, by groups of one rank.

    torch names a group that is made without the whole world after its members and the number of groups that the rank
    is in already. Where these differ, as between pipeline stages, ranks wait for one another under different names.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    counts = [0] * dist.get_world_size(group)
    dist.all_gather_object(counts, count, group=group)
    for _ in range(max(counts) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
