"""Trace to routers: replayed rows of one forward, the selection they force, and the proof that it happened."""

from foreroute.replay.rows import ReplayRows
from foreroute.replay.selection import forced_selection

__all__ = ["ReplayRows", "forced_selection"]
