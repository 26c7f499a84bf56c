"""Where each row goes: packing, padding and the splits of parallel training, as pure index arithmetic. No torch."""

from foreroute.layout.match_tokens import locate_rows, starts_from_cumulative_lengths, starts_from_positions
from foreroute.layout.micro_batches import MicroBatches, by_token_budget
from foreroute.layout.rank_rows import PAD, RankRoutes, RankRows, block_homes, collect, fill_padding, take
from foreroute.layout.slots import Layout, pack, pad

__all__ = [
    "PAD",
    "Layout",
    "MicroBatches",
    "RankRoutes",
    "RankRows",
    "block_homes",
    "by_token_budget",
    "collect",
    "fill_padding",
    "locate_rows",
    "pack",
    "pad",
    "starts_from_cumulative_lengths",
    "starts_from_positions",
    "take",
]
