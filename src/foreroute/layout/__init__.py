"""Places of rows: packing, padding and the splits of parallel training, as pure index arithmetic. No torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foreroute.layout.match_tokens import locate_rows, starts_from_cumulative_lengths, starts_from_positions
from foreroute.layout.rank_rows import PAD, RankRoutes, RankRows, collect, take_routes
from foreroute.layout.router_rows import Layout, pack, pad

if TYPE_CHECKING:
    from foreroute.layout.by_routes import PackingCertificate
    from foreroute.layout.packing import Packing, exchange_sequences, pack_sequences

__all__ = [
    "PAD",
    "Layout",
    "Packing",
    "PackingCertificate",
    "RankRoutes",
    "RankRows",
    "collect",
    "exchange_sequences",
    "locate_rows",
    "pack",
    "pack_sequences",
    "pad",
    "starts_from_cumulative_lengths",
    "starts_from_positions",
    "take_routes",
]


def __getattr__(name: str) -> Any:
    """Load the packer when it is asked for."""
    if name not in ("Packing", "PackingCertificate", "exchange_sequences", "pack_sequences"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "by_routes" if name == "PackingCertificate" else "packing"
    return getattr(import_module(f"{__name__}.{room}"), name)
