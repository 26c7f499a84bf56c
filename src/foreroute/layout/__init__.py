"""Where each row goes: index arithmetic between packed traces and the batches that models see. No torch."""

from foreroute.layout.micro_batches import by_token_budget
from foreroute.layout.padded import locate_rows

__all__ = ["by_token_budget", "locate_rows"]
