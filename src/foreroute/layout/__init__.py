"""Where each row goes: packing, padding and the splits of parallel training, as pure index arithmetic. No torch."""

from foreroute.layout.micro_batches import MicroBatches, by_token_budget
from foreroute.layout.padded import locate_rows
from foreroute.layout.pipeline import PipelineStages
from foreroute.layout.rank_rows import RankRows, collect
from foreroute.layout.runs import PAD
from foreroute.layout.segments import starts_from_cumulative_lengths, starts_from_positions
from foreroute.layout.slots import Layout, pack, pad
from foreroute.layout.take import RankRoutes, block_homes, fill_padding, take

__all__ = [
    "PAD",
    "Layout",
    "MicroBatches",
    "PipelineStages",
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
