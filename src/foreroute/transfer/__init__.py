"""From a plan to moved weights: moves and rounds (no torch), and the engines that carry them out (torch.distributed).

Importing this package loads no torch; `foreroute.transfer.direct` and its neighbours do.
"""

from foreroute.transfer.cell import Cell, ReplicaWeights, Returning
from foreroute.transfer.moves import Moves, gradient_moves, home_row_E, replica_moves, shard_moves

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
