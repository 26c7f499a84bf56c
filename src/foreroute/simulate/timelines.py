"""When every rank and every resource is busy in one micro-step: spans, for a picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from foreroute.errors import ConfigError
from foreroute.simulate.cell_costs import StagePass
from foreroute.simulate.config import SimulateConfig
from foreroute.simulate.engine import StageRun
from foreroute.simulate.ep_group import EPGroup, forward_only, update_orders
from foreroute.simulate.methods import METHODS, check_methods, not_executed, serve
from foreroute.simulate.steps import group_steps

RESOURCES = ("compute", "links", "copy engine")


@dataclass(frozen=True)
class Span:
    """One rank's resource is busy with one thing.

    Attributes:
        rank: of the group, from 0.
        resource: of `RESOURCES`.
        what: "attention", "experts", "waits for weights", "dispatch", "combine" or "fetch".
        layer: of the model, from 0.
        backward: in a backward pass.
        begin_s, end_s: seconds from the begin of the stage.
    """

    rank: int
    resource: str
    what: str
    layer: int
    backward: bool
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One micro-step of one pipeline stage under one method. What a fetch takes over the links is not drawn.

    Attributes:
        method: short name.
        label: for people.
        not_executed: as in `MethodRecord`.
        stage: "recompute" or "update".
        micro_step: from 0.
        num_ranks: of the group.
        spans: sorted by their begin.
    """

    method: str
    label: str
    not_executed: tuple[str, ...]
    stage: str
    micro_step: int
    num_ranks: int
    spans: tuple[Span, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def timeline(
    config: SimulateConfig, method: str, *, stage: str = "recompute", micro_step: int = 1, layers: range | None = None
) -> Timeline:
    """Simulate the first group and look at one micro-step of its first pipeline stage.

    Args:
        config: of the simulation.
        method: of `METHODS`.
        stage: "recompute" or "update".
        micro_step: from 0; the first finds empty slots and is not like the others.
        layers: those to look at; the first pipeline stage's by default.

    Raises:
        ConfigError: when there is no such method, stage, micro-step or layer.
    """
    check_methods([method])
    if stage not in ("recompute", "update"):
        raise ConfigError(f"stage is {stage!r}; expected 'recompute' or 'update'")
    cluster = config.described()
    step = next(iter(group_steps(config, cluster.topology, cluster.costs.model)))
    served = serve(METHODS[method], step.problem, cluster.costs)
    group = EPGroup.of(served, step, config, cluster.topology, cluster.costs)
    num_micro_steps = len(group.compute.all_to_all_ML)
    chosen = group.parts[0] if layers is None else layers
    if not 0 <= micro_step < num_micro_steps or not set(chosen) <= set(group.parts[0]):
        raise ConfigError(
            f"there is no micro-step {micro_step} with layers {chosen}; expected one of {num_micro_steps} micro-steps "
            f"and layers of the first pipeline stage, {group.parts[0]}"
        )
    runs = group.run()
    updating = stage == "update"
    order = update_orders(len(group.parts), num_micro_steps)[0] if updating else forward_only(num_micro_steps)
    passes = [(v, stage_pass) for v, stage_pass in enumerate(order) if stage_pass.micro_step == micro_step]
    spans = [
        span
        for v, stage_pass in passes
        for span in _spans(group, runs[updating], v, stage_pass)
        if span.layer in chosen
    ]
    return Timeline(
        method=method,
        label=METHODS[method].label,
        not_executed=not_executed(METHODS[method], config),
        stage=stage,
        micro_step=micro_step,
        num_ranks=cluster.topology.num_ranks,
        spans=tuple(sorted(spans, key=lambda span: (span.begin_s, span.rank))),
    )


def _spans(group: EPGroup, run: StageRun, v: int, stage_pass: StagePass) -> Iterator[Span]:
    part = group.parts[0]
    for k in range(len(part)):
        place, layer = v * len(part) + k, part.stop - 1 - k if stage_pass.backward else part.start + k
        times_X = run.times_PNX[0, place]
        for rank in range(group.compute.head_MG.shape[1]):
            begin, end = run.fetched_PNG2[0, place, rank].tolist()
            if end > begin:
                yield Span(rank, "copy engine", "fetch", layer, False, begin, end)
            there = max(end, float(run.direct_end_PN[0, place]))
            yield from _forward(group, rank, stage_pass.micro_step, layer, times_X[:5].tolist(), there)
            if np.isfinite(times_X[5]):
                yield from _backward(group, rank, stage_pass.micro_step, layer, times_X[5:].tolist())


def _forward(group: EPGroup, rank: int, m: int, layer: int, at: list[float], there: float) -> Iterator[Span]:
    attention_s = group.compute.attention_MG2[m, rank, 0] + group.compute.layer_s
    experts_s = group.compute.experts_MLG2[m, layer, rank, 0]
    begin, attended, dispatched, computed, end = at
    yield Span(rank, "compute", "attention", layer, False, begin, begin + float(attention_s))
    yield Span(rank, "links", "dispatch", layer, False, attended, dispatched)
    if there > dispatched:
        yield Span(rank, "compute", "waits for weights", layer, False, dispatched, there)
    start = max(dispatched, there)
    yield Span(rank, "compute", "experts", layer, False, start, start + float(experts_s))
    yield Span(rank, "links", "combine", layer, False, computed, end)


def _backward(group: EPGroup, rank: int, m: int, layer: int, at: list[float]) -> Iterator[Span]:
    attention_s = group.compute.attention_MG2[m, rank, 1] + group.compute.layer_s
    experts_s = group.compute.experts_MLG2[m, layer, rank, 1]
    begin, combined, computed, dispatched, _ = at
    yield Span(rank, "links", "combine", layer, True, begin, combined)
    yield Span(rank, "compute", "experts", layer, True, combined, combined + float(experts_s))
    yield Span(rank, "links", "dispatch", layer, True, computed, dispatched)
    yield Span(rank, "compute", "attention", layer, True, dispatched, dispatched + float(attention_s))
