"""The recurrence of `engine.py`, compiled.

A *place* is a cell in the order of a pipeline stage: visit * layers of the stage + position in the visit, where
backward visits take the layers from last to first.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
from numba import njit

ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED, HEAD, PLAN, BUBBLE = range(8)

# Of one pipeline stage. `clock` holds one number, `marks` three: places released, attended and served so far.
Lane = namedtuple("Lane", "clock marks queued_G4 owed_G4 host_G parts_X times_NX fetched_NG2 bursts_N")


@njit(nogil=True, cache=True)
def run(visits_PVK: Any, bounds: Any, groups_KF: Any, ready_M: Any, work: Any, rules: Any) -> Any:
    """All visits of all pipeline stages, each as soon as its causes are known."""
    num_stages, num_visits = visits_PVK.shape[:2]
    ranks, micro_steps = work.head_MG.shape[1], work.head_MG.shape[0]
    most = num_visits * (bounds[1:] - bounds[:-1]).max()
    clock_P, marks_P3 = np.zeros((num_stages, 1)), np.full((num_stages, 3), -1, np.int64)
    queued, owed = np.zeros((num_stages, ranks, 4)), np.zeros((num_stages, ranks, 4))
    host, parts = np.zeros((num_stages, ranks)), np.zeros((num_stages, 8))
    times = np.full((num_stages, most, 10), np.nan)
    fetched, bursts = np.zeros((num_stages, most, ranks, 2)), np.zeros((num_stages, most))
    marks_P3[:, 0] = 0
    done_KPM = np.full((2, num_stages, micro_steps), np.inf)
    next_P = np.zeros(num_stages, np.int64)
    left = num_stages * num_visits
    while left > 0:
        before = left
        for p in range(num_stages):
            lane = Lane(clock_P[p], marks_P3[p], queued[p], owed[p], host[p], parts[p], times[p], fetched[p], bursts[p])
            while next_P[p] < num_visits:
                kind, m = visits_PVK[p, next_P[p]]
                cause = _cause(kind, p, m, done_KPM, work.send_M)
                if cause == np.inf:
                    break
                _wait(lane, BUBBLE, cause)
                if p == 0:
                    _wait(lane, PLAN, ready_M[m])
                _visit(
                    lane,
                    next_P[p],
                    visits_PVK[p],
                    bounds[p],
                    bounds[p + 1],
                    p == num_stages - 1,
                    groups_KF,
                    work,
                    rules,
                )
                done_KPM[kind, p, m] = lane.clock[0]
                next_P[p] += 1
                left -= 1
        if left == before:
            raise ValueError("the pipeline schedule waits for itself")
    for p in range(num_stages):
        tail = max(0.0, (queued[p] + owed[p]).max())
        parts[p, EXPOSED] += tail
        clock_P[p, 0] += tail
    return parts, clock_P[:, 0].copy(), times, fetched, bursts


@njit(nogil=True, cache=True)
def _cause(kind: int, p: int, m: int, done_KPM: Any, send_M: Any) -> float:
    """When what a visit builds on has arrived; infinite while that is not known."""
    num_stages = done_KPM.shape[1]
    if kind == 0:
        return 0.0 if p == 0 else done_KPM[0, p - 1, m] + send_M[m]
    return 0.0 if p == num_stages - 1 else done_KPM[1, p + 1, m] + send_M[m]


@njit(nogil=True, cache=True)
def _wait(lane: Any, part: int, until: float) -> None:
    seconds = until - lane.clock[0]
    if seconds > 0:
        _elapse(lane, part, seconds, seconds)


@njit(nogil=True, cache=True)
def _elapse(lane: Any, part: int, seconds: float, capacity: float) -> None:
    """Let time pass in which the links have so many seconds for fetches and then for gradients."""
    lane.clock[0] += seconds
    lane.parts_X[part] += seconds
    if capacity <= 0:
        return
    for g in range(lane.queued_G4.shape[0]):
        for k in range(4):
            used = min(capacity, lane.queued_G4[g, k])
            lane.queued_G4[g, k] -= used
            lane.owed_G4[g, k] = max(0.0, lane.owed_G4[g, k] - (capacity - used))


@njit(nogil=True, cache=True)
def _visit(
    lane: Any, v: int, visits_VK: Any, first: int, end: int, is_last: bool, groups_KF: Any, work: Any, rules: Any
) -> None:
    kind, m = visits_VK[v]
    forwards, backwards = groups_KF[kind]
    layers = end - first
    head_s = phase_seconds(work.head_MG[m], rules) if is_last else 0.0
    if kind == 1 and is_last:
        _elapse(lane, HEAD, 2 * head_s, 2 * head_s)
    for k in range(layers):
        place = v * layers + k
        layer = end - 1 - k if kind == 1 else first + k
        for i in range(forwards + backwards):
            _pass(lane, place, kind, m, layer, i, i >= forwards, visits_VK, first, end, work, rules)
        lane.marks[2] = place
        _release(lane, visits_VK, first, end, work, rules)
    if kind == 0 and is_last:
        _elapse(lane, HEAD, head_s, head_s)


@njit(nogil=True, cache=True)
def _pass(
    lane: Any,
    place: int,
    kind: int,
    m: int,
    layer: int,
    i: int,
    backward: bool,
    visits_VK: Any,
    first: int,
    end: int,
    work: Any,
    rules: Any,
) -> None:
    """One pass over one cell."""
    side = 1 if backward else 0
    attention_s = phase_seconds(work.attention_MG2[m, :, side], rules)
    experts_s = phase_seconds(work.experts_MLG2[m, layer, :, side], rules)
    hidden = min(2 * work.leg_ML[m, layer], rules.overlap * (attention_s + experts_s))
    leg_s = work.leg_ML[m, layer] - hidden / 2
    computing = attention_s + experts_s + work.layer_s
    rate = 1 - hidden / computing if computing > 0 else 1.0
    span = lane.times_NX[place, 5 * i : 5 * i + 5]
    span[0] = lane.clock[0]
    if backward:
        _elapse(lane, ALL_TO_ALL, leg_s, 0.0)
        span[1] = lane.clock[0]
        _elapse(lane, EXPERTS, experts_s, rate * experts_s)
        lane.owed_G4[:] += work.gradient_MLG4[m, layer]
        span[2] = lane.clock[0]
        _elapse(lane, ALL_TO_ALL, leg_s, 0.0)
        span[3] = lane.clock[0]
        _attend(lane, attention_s, work.layer_s, rate)
    else:
        _attend(lane, attention_s, work.layer_s, rate)
        span[1] = lane.clock[0]
        if i == 0:
            lane.marks[1] = place
            _release(lane, visits_VK, first, end, work, rules)
        _elapse(lane, ALL_TO_ALL, leg_s, 0.0)
        span[2] = lane.clock[0]
        if i == 0:
            _serve(lane, place, m, layer, visits_VK, first, end, experts_s, rate, work, rules)
        else:
            _elapse(lane, EXPERTS, experts_s, rate * experts_s)
        span[3] = lane.clock[0]
        _elapse(lane, ALL_TO_ALL, leg_s, 0.0)
    span[4] = lane.clock[0]


@njit(nogil=True, cache=True)
def _attend(lane: Any, attention_s: float, layer_s: float, rate: float) -> None:
    _elapse(lane, ATTENTION, attention_s, rate * attention_s)
    _elapse(lane, FIXED, layer_s, rate * layer_s)


@njit(nogil=True, cache=True)
def _serve(
    lane: Any,
    place: int,
    m: int,
    layer: int,
    visits_VK: Any,
    first: int,
    end: int,
    experts_s: float,
    rate: float,
    work: Any,
    rules: Any,
) -> None:
    """The experts of the first pass, which wait for what is fetched for them."""
    now = lane.clock[0]
    burst_s = 0.0
    ranks = lane.host_G.shape[0]
    for g in range(ranks):
        for k in range(4):
            left = lane.queued_G4[g, k]
            for later in range(place + 1, lane.marks[0]):
                c, n, la = _cell(later, visits_VK, first, end)
                left -= work.direct_KMLG4[c, n, la, g, k]
            # A sum of the others less themselves leaves crumbs of rounding.
            if left > 1e-15:
                burst_s = max(burst_s, _until(left, experts_s, rate))
    lane.bursts_N[place] = now + burst_s
    longest, waited = 0.0, burst_s
    for g in range(ranks):
        wait = max(burst_s, lane.fetched_NG2[place, g, 1] - now)
        waited = max(waited, wait)
        longest = max(longest, wait + work.experts_MLG2[m, layer, g, 0])
    if rules.processors_per_node < rules.ranks_per_node:
        longest = waited + experts_s
    exposed = longest - experts_s
    _elapse(lane, EXPERTS, experts_s, rate * experts_s)
    _elapse(lane, EXPOSED, exposed, exposed)


@njit(nogil=True, cache=True)
def _until(seconds: float, phase_s: float, rate: float) -> float:
    """When so much work of a link is done that has a part of the phase, and all of the time after it."""
    if seconds <= rate * phase_s:
        return seconds / rate
    return phase_s + seconds - rate * phase_s


@njit(nogil=True, cache=True)
def _release(lane: Any, visits_VK: Any, first: int, end: int, work: Any, rules: Any) -> None:
    """Begin all fetches whose time has come."""
    layers = end - first
    prefetch, keeps = rules.prefetch, rules.keeps_slots
    while lane.marks[0] < len(visits_VK) * layers:
        place = lane.marks[0]
        if lane.marks[1] < max(place - prefetch, 0):
            return
        kind, m, layer = _cell(place, visits_VK, first, end)
        if keeps and place >= layers:
            before = place // layers - 1
            k = end - 1 - layer if visits_VK[before, 0] == 1 else layer - first
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


@njit(nogil=True, cache=True)
def _cell(place: int, visits_VK: Any, first: int, end: int) -> Any:
    """Kind, micro-step and layer of a place."""
    v, k = divmod(place, end - first)
    kind, m = visits_VK[v]
    return kind, m, (end - 1 - k if kind == 1 else first + k)


@njit(nogil=True, cache=True)
def phase_seconds(work_G: Any, rules: Any) -> float:
    """When the last rank ends that begins with the others.

    With fewer processors than ranks in a node they take turns, as an operating system lets them.
    """
    per_node, processors = rules.ranks_per_node, rules.processors_per_node
    slowest: float = work_G.max()
    if processors >= per_node:
        return slowest
    for first in range(0, len(work_G), per_node):
        ordered = np.sort(work_G[first : first + per_node])
        now, done = 0.0, 0.0
        for i in range(len(ordered)):
            now += (ordered[i] - done) * max(1.0, (len(ordered) - i) / processors)
            done = ordered[i]
        slowest = max(slowest, now)
    return slowest
