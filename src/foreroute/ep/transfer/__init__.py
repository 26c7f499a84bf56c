"""From a schedule to moved weights: the engines that carry its moves out on torch.distributed.

`TransferEngine` moves what layers ask of replicas, by `peers` and by `host_memory`; `home_moves` and `segments` move
experts to other homes.
"""

from foreroute.ep.transfer.moves import Moves, home_row_E, shard_moves
from foreroute.ep.transfer.replica_weights import Cell, Fetch

__all__ = [
    "Cell",
    "Fetch",
    "Moves",
    "home_row_E",
    "shard_moves",
]
