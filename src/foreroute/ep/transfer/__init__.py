"""From a schedule to moved weights: the engines that carry its moves out on torch.distributed.

`ReplicaWeights` says what layers ask of whoever moves their replicas. `DirectWeights` and `TransferEngine` do it, by
`peers`, and the engine by `host_memory` too.
"""

from foreroute.ep.transfer.moves import Moves, home_row_E, shard_moves
from foreroute.ep.transfer.replica_weights import Cell, Fetch, ReplicaWeights

__all__ = [
    "Cell",
    "Fetch",
    "Moves",
    "ReplicaWeights",
    "home_row_E",
    "shard_moves",
]
