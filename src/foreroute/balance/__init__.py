"""From counts of assignments to the load of expert-parallel ranks. No torch."""

from foreroute.balance.load import contiguous_imbalance

__all__ = ["contiguous_imbalance"]
