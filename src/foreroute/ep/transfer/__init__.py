"""From a plan to moved weights: moves and rounds, and the engines that carry them out on torch.distributed.

`ReplicaWeights` says what the layer asks of whoever moves its replicas. `DirectWeights` and `TransferEngine` do it;
both take `moves` from a plan and carry them out by `peers`, and the engine by `host_memory` too.
"""

from foreroute.ep.transfer.moves import Moves, gradient_moves, home_row_E, replica_moves, shard_moves
from foreroute.ep.transfer.replica_weights import Cell, PendingGradients, ReplicaWeights

__all__ = [
    "Cell",
    "Moves",
    "PendingGradients",
    "ReplicaWeights",
    "gradient_moves",
    "home_row_E",
    "replica_moves",
    "shard_moves",
]
