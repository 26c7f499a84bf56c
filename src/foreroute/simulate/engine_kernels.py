"""The recurrence of `engine.py`, compiled.

A *place* is a cell in the order of a pipeline stage: visit * layers of the stage + position in the visit, where
backward visits take the layers from last to first.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from foreroute.kernels import kernel
from foreroute.simulate.clock_kernels import (
    ALL_TO_ALL,
    BUBBLE,
    EXPERTS,
    EXPOSED,
    HEAD,
    PLAN,
    Lane,
    attend,
    elapse,
    phase_seconds,
    until,
    wait,
)

# What a pipeline stage does: its visits, as kind and micro-step, to its layers from `first` to before `end`.
Duty = namedtuple("Duty", "visits_VK first end is_last")


@kernel
def run(visits_PVK: Any, bounds: Any, groups_KF: Any, ready_M: Any, work: Any, rules: Any) -> Any:
    """All visits of all pipeline stages, each as soon as its causes are known."""
    num_stages, num_visits = visits_PVK.shape[:2]
    state = _at_rest(num_stages, num_visits * (bounds[1:] - bounds[:-1]).max(), work.head_MG.shape[1])
    done_KPM = np.full((2, num_stages, len(work.head_MG)), np.inf)
    next_P = np.zeros(num_stages, np.int64)
    left = num_stages * num_visits
    while left > 0:
        before = left
        for p in range(num_stages):
            lane, duty = _lane(state, p), Duty(visits_PVK[p], bounds[p], bounds[p + 1], p == num_stages - 1)
            while next_P[p] < num_visits:
                kind, m = visits_PVK[p, next_P[p]]
                cause = _cause(kind, p, m, done_KPM, work.send_M)
                if cause == np.inf:
                    break
                wait(lane, BUBBLE, cause)
                if p == 0:
                    wait(lane, PLAN, ready_M[m])
                _visit(lane, next_P[p], duty, groups_KF, work, rules)
                done_KPM[kind, p, m] = lane.clock[0]
                next_P[p] += 1
                left -= 1
        if left == before:
            raise ValueError("the pipeline schedule waits for itself")
    for p in range(num_stages):
        tail = max(0.0, (state.queued_G4[p] + state.owed_G4[p]).max())
        state.parts_X[p, EXPOSED] += tail
        state.clock[p, 0] += tail
    return state.parts_X, state.clock[:, 0].copy(), state.times_NX, state.fetched_NG2, state.bursts_N


@kernel
def _at_rest(num_stages: int, num_places: int, ranks: int) -> Any:
    """A lane whose arrays have one more axis in front, for the pipeline stages."""
    marks_P3 = np.full((num_stages, 3), -1, np.int64)
    marks_P3[:, 0] = 0
    return Lane(
        np.zeros((num_stages, 1)),
        marks_P3,
        np.zeros((num_stages, ranks, 4)),
        np.zeros((num_stages, ranks, 4)),
        np.zeros((num_stages, ranks)),
        np.zeros((num_stages, 8)),
        np.full((num_stages, num_places, 10), np.nan),
        np.zeros((num_stages, num_places, ranks, 2)),
        np.zeros((num_stages, num_places)),
    )


@kernel
def _lane(state: Any, p: int) -> Any:
    """That of one pipeline stage."""
    return Lane(
        state.clock[p],
        state.marks[p],
        state.queued_G4[p],
        state.owed_G4[p],
        state.host_G[p],
        state.parts_X[p],
        state.times_NX[p],
        state.fetched_NG2[p],
        state.bursts_N[p],
    )


@kernel
def _cause(kind: int, p: int, m: int, done_KPM: Any, send_M: Any) -> float:
    """When what a visit builds on has arrived; infinite while that is not known."""
    num_stages = done_KPM.shape[1]
    if kind == 0:
        return 0.0 if p == 0 else done_KPM[0, p - 1, m] + send_M[m]
    return 0.0 if p == num_stages - 1 else done_KPM[1, p + 1, m] + send_M[m]


@kernel
def _visit(lane: Any, v: int, duty: Any, groups_KF: Any, work: Any, rules: Any) -> None:
    kind, m = duty.visits_VK[v]
    forwards, backwards = groups_KF[kind]
    layers = duty.end - duty.first
    head_s = phase_seconds(work.head_MG[m], rules) if duty.is_last else 0.0
    if kind == 1 and duty.is_last:
        elapse(lane, HEAD, 2 * head_s, 2 * head_s)
    for place in range(v * layers, (v + 1) * layers):
        for i in range(forwards + backwards):
            _pass(lane, place, i, i >= forwards, duty, work, rules)
        lane.marks[2] = place
        _release(lane, duty, work, rules)
    if kind == 0 and duty.is_last:
        elapse(lane, HEAD, head_s, head_s)


@kernel
def _pass(lane: Any, place: int, i: int, backward: bool, duty: Any, work: Any, rules: Any) -> None:
    """One pass over one cell."""
    side = 1 if backward else 0
    _, m, layer = _cell(place, duty)
    attention_s = phase_seconds(work.attention_MG2[m, :, side], rules)
    experts_s = phase_seconds(work.experts_MLG2[m, layer, :, side], rules)
    hidden = min(2 * work.leg_ML[m, layer], rules.overlap * (attention_s + experts_s))
    leg_s = work.leg_ML[m, layer] - hidden / 2
    computing = attention_s + experts_s + work.layer_s
    rate = 1 - hidden / computing if computing > 0 else 1.0
    span = lane.times_NX[place, 5 * i : 5 * i + 5]
    span[0] = lane.clock[0]
    if backward:
        elapse(lane, ALL_TO_ALL, leg_s, 0.0)
        span[1] = lane.clock[0]
        elapse(lane, EXPERTS, experts_s, rate * experts_s)
        lane.owed_G4[:] += work.gradient_MLG4[m, layer]
        span[2] = lane.clock[0]
        elapse(lane, ALL_TO_ALL, leg_s, 0.0)
        span[3] = lane.clock[0]
        attend(lane, attention_s, work.layer_s, rate)
    else:
        attend(lane, attention_s, work.layer_s, rate)
        span[1] = lane.clock[0]
        if i == 0:
            lane.marks[1] = place
            _release(lane, duty, work, rules)
        elapse(lane, ALL_TO_ALL, leg_s, 0.0)
        span[2] = lane.clock[0]
        exposed_s = _exposed(lane, place, duty, experts_s, rate, work, rules) if i == 0 else 0.0
        elapse(lane, EXPERTS, experts_s, rate * experts_s)
        elapse(lane, EXPOSED, exposed_s, exposed_s)
        span[3] = lane.clock[0]
        elapse(lane, ALL_TO_ALL, leg_s, 0.0)
    span[4] = lane.clock[0]


@kernel
def _exposed(lane: Any, place: int, duty: Any, experts_s: float, rate: float, work: Any, rules: Any) -> float:
    """Seconds that the experts of the first pass take longer, since they wait for what is fetched for them."""
    _, m, layer = _cell(place, duty)
    now = lane.clock[0]
    burst_s = _burst(lane, place, duty, experts_s, rate, work)
    lane.bursts_N[place] = now + burst_s
    longest, waited = 0.0, burst_s
    for g in range(lane.host_G.shape[0]):
        wait_s = max(burst_s, lane.fetched_NG2[place, g, 1] - now)
        waited = max(waited, wait_s)
        longest = max(longest, wait_s + work.experts_MLG2[m, layer, g, 0])
    if rules.processors_per_node < rules.ranks_per_node:
        longest = waited + experts_s
    return longest - experts_s


@kernel
def _burst(lane: Any, place: int, duty: Any, experts_s: float, rate: float, work: Any) -> float:
    """Seconds until the direct fetches of a place, and of those before it, have all arrived."""
    burst_s = 0.0
    for g in range(lane.host_G.shape[0]):
        for k in range(4):
            left = lane.queued_G4[g, k]
            for later in range(place + 1, lane.marks[0]):
                c, n, la = _cell(later, duty)
                left -= work.direct_KMLG4[c, n, la, g, k]
            # A sum of the others less themselves leaves crumbs of rounding.
            if left > 1e-15:
                burst_s = max(burst_s, until(left, experts_s, rate))
    return burst_s


@kernel
def _release(lane: Any, duty: Any, work: Any, rules: Any) -> None:
    """Begin all fetches whose time has come."""
    layers = duty.end - duty.first
    while lane.marks[0] < len(duty.visits_VK) * layers:
        place = lane.marks[0]
        if lane.marks[1] < max(place - rules.prefetch, 0):
            return
        kind, m, layer = _cell(place, duty)
        if rules.keeps_slots and place >= layers:
            before = place // layers - 1
            k = duty.end - 1 - layer if duty.visits_VK[before, 0] == 1 else layer - duty.first
            if lane.marks[2] < before * layers + k:
                return
        for g in range(lane.host_G.shape[0]):
            seconds = work.host_KMLG[kind, m, layer, g]
            if seconds > 0:
                begin = max(lane.host_G[g], lane.clock[0])
                lane.host_G[g] = begin + seconds
                lane.fetched_NG2[place, g, 0] = begin
                lane.fetched_NG2[place, g, 1] = begin + seconds
        lane.queued_G4[:] += work.direct_KMLG4[kind, m, layer]
        lane.marks[0] += 1


@kernel
def _cell(place: int, duty: Any) -> Any:
    """Kind, micro-step and layer of a place."""
    v, k = divmod(place, duty.end - duty.first)
    kind, m = duty.visits_VK[v]
    return kind, m, (duty.end - 1 - k if kind == 1 else duty.first + k)
