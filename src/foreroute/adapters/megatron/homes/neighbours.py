"""The ranks between which the experts of a pipeline stage can move."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from foreroute.ep.transfer.peers import PeerGroup, lost


class Neighbours:
    """Ranks that have the same layers and the same cut of each expert: all places, and all copies of each.

    All of them must make it together.

    Args:
        ep_group: of this rank, in the order of places.
        copies_group: of this rank, ranks that hold the same experts (expert data parallelism).

    Attributes:
        peers: the ranks.
        number_GD: int64 [G, D], the number among the peers of each copy of each place.
    """

    def __init__(self, ep_group: Any, copies_group: Any) -> None:
        of_places: list[Any] = [None] * ep_group.size()
        _gather(of_places, dist.get_process_group_ranks(copies_group), ep_group)
        ranks = sorted(rank for copies in of_places for rank in copies)
        self.peers = PeerGroup(copies_group, ep_group, ranks=ranks)
        self.number_GD = np.array([[ranks.index(rank) for rank in copies] for copies in of_places])

    def gather(self, mine: Any) -> list[Any]:
        """What each of them says, by its number.

        Raises:
            TransferError: when one does not answer.
        """
        said: list[Any] = [None] * self.peers.size
        _gather(said, mine, self.peers.group)
        return said


def _gather(said: list[Any], mine: Any, group: Any) -> None:
    try:
        dist.all_gather_object(said, mine, group=group)
    except RuntimeError as error:
        raise lost("moving homes", dist.get_rank(), error) from error
