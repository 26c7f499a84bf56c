"""From a plan to moved weights: moves and rounds, and the engines that carry them out on torch.distributed.

`cell` says what the layer asks of whoever moves its replicas. `DirectWeights` in `direct` and `TransferEngine` in
`engine` do it; both take `moves` from a plan and carry them out by `peers`, and the engine by `host_memory` too.
"""

from foreroute.ep.transfer.cell import Cell, ReplicaWeights, Returning
from foreroute.ep.transfer.moves import Moves, gradient_moves, home_row_E, replica_moves, shard_moves

__all__ = [
    "Cell",
    "Moves",
    "ReplicaWeights",
    "Returning",
    "gradient_moves",
    "home_row_E",
    "replica_moves",
    "shard_moves",
]
