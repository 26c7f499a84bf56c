"""When every rank and every resource is busy in one micro-step of the recompute: spans, for a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from foreroute.simulate.engine import GroupRun
from foreroute.simulate.ep_group import EPGroup

RESOURCES = ("compute", "links", "copy engine")
NUM_LAYERS = 5
"""Layers of a timeline, in the middle of the model."""


@dataclass(frozen=True)
class Span:
    """One rank's resource is busy with one thing.

    Attributes:
        rank: of the group, from 0.
        resource: of `RESOURCES`.
        what: "attention", "experts", "waits for weights", "dispatch", "combine" or "fetch".
        layer: of the model, from 0.
        begin_s, end_s: seconds from the begin of the recompute.
    """

    rank: int
    resource: str
    what: str
    layer: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One micro-step of the recompute under one method. What a fetch takes over the links is not drawn.

    Attributes:
        method: short name.
        micro_step: from 0.
        num_ranks: of the group.
        spans: sorted by their begin.
    """

    method: str
    micro_step: int
    num_ranks: int
    spans: tuple[Span, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def timeline(method: str, group: EPGroup) -> Timeline:
    """Look at a group that `simulate` has planned, in its second micro-step: the first finds empty slots.

    The recompute is taken to begin when all is planned.
    """
    work = group.recompute
    num_micro_steps, num_ranks = work.head_MG.shape
    micro_step, num_layers = min(1, num_micro_steps - 1), work.all_to_all_ML.shape[1]
    # the first layers fetch into an empty pipeline, and the last have nothing after them
    first = max(0, (num_layers - NUM_LAYERS) // 2)
    layers = range(first, min(first + NUM_LAYERS, num_layers))
    recompute, _ = group.run()
    spans = [span for layer in layers for span in _spans(group, recompute, micro_step, layer)]
    in_order = tuple(sorted(spans, key=lambda span: (span.begin_s, span.rank)))
    return Timeline(method=method, micro_step=micro_step, num_ranks=num_ranks, spans=in_order)


def _spans(group: EPGroup, recompute: GroupRun, micro_step: int, layer: int) -> Iterator[Span]:
    work = group.recompute
    place = micro_step * work.all_to_all_ML.shape[1] + layer
    begin, attended, dispatched, computed, end = recompute.times_NX[place, :5].tolist()
    for rank in range(work.head_MG.shape[1]):
        fetching, fetched = recompute.fetched_NG2[place, rank].tolist()
        if fetched > fetching:
            yield Span(rank, "copy engine", "fetch", layer, fetching, fetched)
        attention_s = work.attention_MG2[micro_step, rank, 0] + work.layer_s
        experts_s = work.experts_MLG2[micro_step, layer, rank, 0]
        yield Span(rank, "compute", "attention", layer, begin, begin + float(attention_s))
        yield Span(rank, "links", "dispatch", layer, attended, dispatched)
        start = max(dispatched, fetched, float(recompute.direct_end_N[place]))
        if start > dispatched:
            yield Span(rank, "compute", "waits for weights", layer, dispatched, start)
        yield Span(rank, "compute", "experts", layer, start, start + float(experts_s))
        yield Span(rank, "links", "combine", layer, computed, end)
