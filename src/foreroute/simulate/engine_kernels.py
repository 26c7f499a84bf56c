"""The recurrence of `engine.py`, compiled.

A *place* is a cell in the order of a pipeline stage: stage pass * layers of the stage + position in the pass, where
backward passes take the layers from last to first.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from foreroute.kernels import kernel
from foreroute.simulate.engine import PARTS

ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED, HEAD, PLAN, BUBBLE = range(len(PARTS))

FETCHING, ATTENDED, ENDED = range(3)
"""Indices of `progress`: the next place to fetch for, the last that ended its attention, the last that ended."""
BEGIN, FIRST, SECOND, THIRD, END = range(5)
"""Times of a pass over a cell: its begin, and the ends of its four parts in their order."""

# One pipeline stage at a moment. `clock` holds its seconds, `progress` three places. `queued_G4` and `owed_G4` are
# seconds of direct fetches and of gradients that the links have not carried yet; `host_G` is when each copy engine is
# free.
StageState = namedtuple(
    "StageState", "clock progress queued_G4 owed_G4 host_G parts_X times_NX fetched_NG2 direct_end_N"
)

# What a pipeline stage does: its stage passes, as kind and micro-step, to its layers from `first` to before `end`.
StageOrder = namedtuple("StageOrder", "passes_VK first end is_last")


@kernel
def run(passes_PVK: Any, bounds: Any, passes_per_kind_KF: Any, ready_M: Any, work: Any, model: Any) -> Any:
    """All stage passes of all pipeline stages, each as soon as its causes are known."""
    num_stages, num_passes = passes_PVK.shape[:2]
    states = _initial_states(num_stages, num_passes * (bounds[1:] - bounds[:-1]).max(), work.head_MG.shape[1])
    done_KPM = np.full((2, num_stages, len(work.head_MG)), np.inf)
    next_P = np.zeros(num_stages, np.int64)
    left = num_stages * num_passes
    while left > 0:
        before = left
        for p in range(num_stages):
            state = _state_of(states, p)
            order = StageOrder(passes_PVK[p], bounds[p], bounds[p + 1], p == num_stages - 1)
            # A stage runs ahead as far as the others let it: every time that a pass reads is already final.
            while next_P[p] < num_passes:
                kind, m = passes_PVK[p, next_P[p]]
                cause = _cause(kind, p, m, done_KPM, work.send_M)
                if cause == np.inf:
                    break
                _wait(state, BUBBLE, cause)
                if p == 0:
                    _wait(state, PLAN, ready_M[m])
                _run_pass(state, next_P[p], order, passes_per_kind_KF, work, model)
                done_KPM[kind, p, m] = state.clock[0]
                next_P[p] += 1
                left -= 1
        # Each round runs one pass at least, unless every stage waits for another.
        if left == before:
            raise ValueError("the pipeline schedule waits for itself")
    for p in range(num_stages):
        # What links still have to carry when the last pass has ended is hidden by nothing.
        tail = max(0.0, (states.queued_G4[p] + states.owed_G4[p]).max())
        states.parts_X[p, EXPOSED] += tail
        states.clock[p, 0] += tail
    return states.parts_X, states.clock[:, 0].copy(), states.times_NX, states.fetched_NG2, states.direct_end_N


@kernel
def _initial_states(num_stages: int, num_places: int, ranks: int) -> Any:
    """A state whose arrays have one more axis in front, for the pipeline stages."""
    progress_P3 = np.full((num_stages, 3), -1, np.int64)
    progress_P3[:, FETCHING] = 0
    return StageState(
        np.zeros((num_stages, 1)),
        progress_P3,
        np.zeros((num_stages, ranks, 4)),
        np.zeros((num_stages, ranks, 4)),
        np.zeros((num_stages, ranks)),
        np.zeros((num_stages, len(PARTS))),
        np.full((num_stages, num_places, 10), np.nan),
        np.zeros((num_stages, num_places, ranks, 2)),
        np.zeros((num_stages, num_places)),
    )


@kernel
def _state_of(states: Any, p: int) -> Any:
    """That of one pipeline stage."""
    return StageState(
        states.clock[p],
        states.progress[p],
        states.queued_G4[p],
        states.owed_G4[p],
        states.host_G[p],
        states.parts_X[p],
        states.times_NX[p],
        states.fetched_NG2[p],
        states.direct_end_N[p],
    )


@kernel
def _cause(kind: int, p: int, m: int, done_KPM: Any, send_M: Any) -> float:
    """When what a stage pass builds on has arrived; infinite while that is not known."""
    num_stages = done_KPM.shape[1]
    if kind == 0:
        return 0.0 if p == 0 else done_KPM[0, p - 1, m] + send_M[m]
    return 0.0 if p == num_stages - 1 else done_KPM[1, p + 1, m] + send_M[m]


@kernel
def _run_pass(state: Any, v: int, order: Any, passes_per_kind_KF: Any, work: Any, model: Any) -> None:
    """One stage pass. `passes_per_kind_KF` says how many forward and backward passes over each cell it consists of."""
    kind, m = order.passes_VK[v]
    forwards, backwards = passes_per_kind_KF[kind]
    layers = order.end - order.first
    head_s = work.head_MG[m].max() if order.is_last else 0.0
    if kind == 1 and order.is_last:
        _elapse(state, HEAD, 2 * head_s, 2 * head_s)
    for place in range(v * layers, (v + 1) * layers):
        for i in range(forwards + backwards):
            _pass_cell(state, place, i, i >= forwards, order, work, model)
        state.progress[ENDED] = place
        _release(state, order, work, model)
    if kind == 0 and order.is_last:
        _elapse(state, HEAD, head_s, head_s)


@kernel
def _pass_cell(state: Any, place: int, i: int, backward: bool, order: Any, work: Any, model: Any) -> None:
    """One pass over one cell."""
    side = 1 if backward else 0
    _, m, layer = _cell(place, order)
    attention_s = work.attention_MG2[m, :, side].max()
    experts_s = work.experts_MLG2[m, layer, :, side].max()
    # What is hidden shortens both all-to-alls alike, and takes the links from fetches while the ranks compute.
    hidden = min(2 * work.all_to_all_ML[m, layer], model.overlap * (attention_s + experts_s))
    all_to_all_s = work.all_to_all_ML[m, layer] - hidden / 2
    computing = attention_s + experts_s + work.layer_s
    rate = 1 - hidden / computing if computing > 0 else 1.0
    # A cell has at most two passes in a stage pass: forward anew, and backward. Each has a begin and four ends.
    times = state.times_NX[place, 5 * i : 5 * i + 5]
    times[BEGIN] = state.clock[0]
    if backward:
        _elapse(state, ALL_TO_ALL, all_to_all_s, 0.0)
        times[FIRST] = state.clock[0]
        _elapse(state, EXPERTS, experts_s, rate * experts_s)
        state.owed_G4[:] += work.gradient_MLG4[m, layer]
        times[SECOND] = state.clock[0]
        _elapse(state, ALL_TO_ALL, all_to_all_s, 0.0)
        times[THIRD] = state.clock[0]
        _attend(state, attention_s, work.layer_s, rate)
    else:
        _attend(state, attention_s, work.layer_s, rate)
        times[FIRST] = state.clock[0]
        if i == 0:
            state.progress[ATTENDED] = place
            _release(state, order, work, model)
        _elapse(state, ALL_TO_ALL, all_to_all_s, 0.0)
        times[SECOND] = state.clock[0]
        exposed_s = _exposed(state, place, order, experts_s, rate, work) if i == 0 else 0.0
        _elapse(state, EXPERTS, experts_s, rate * experts_s)
        _elapse(state, EXPOSED, exposed_s, exposed_s)
        times[THIRD] = state.clock[0]
        _elapse(state, ALL_TO_ALL, all_to_all_s, 0.0)
    times[END] = state.clock[0]


@kernel
def _exposed(state: Any, place: int, order: Any, experts_s: float, rate: float, work: Any) -> float:
    """Seconds that the experts of the first pass take longer, since they wait for what is fetched for them."""
    _, m, layer = _cell(place, order)
    now = state.clock[0]
    direct_s = _direct_wait(state, place, order, experts_s, rate, work)
    state.direct_end_N[place] = now + direct_s
    longest = 0.0
    for g in range(state.host_G.shape[0]):
        wait_s = max(direct_s, state.fetched_NG2[place, g, 1] - now)
        longest = max(longest, wait_s + work.experts_MLG2[m, layer, g, 0])
    return longest - experts_s


@kernel
def _direct_wait(state: Any, place: int, order: Any, experts_s: float, rate: float, work: Any) -> float:
    """Seconds until the direct fetches of a place, and of those before it, have all arrived.

    Links serve places in order, so what is queued less what was queued for later places is in front of them.
    """
    direct_s = 0.0
    for g in range(state.host_G.shape[0]):
        for k in range(4):
            left = state.queued_G4[g, k]
            for later in range(place + 1, state.progress[FETCHING]):
                c, n, la = _cell(later, order)
                left -= work.direct_KMLG4[c, n, la, g, k]
            # Adding the same seconds and taking them off again leaves a rounding error of this size.
            if left > 1e-15:
                direct_s = max(direct_s, _until(left, experts_s, rate))
    return direct_s


@kernel
def _release(state: Any, order: Any, work: Any, model: Any) -> None:
    """Begin all fetches whose time has come."""
    layers = order.end - order.first
    while state.progress[FETCHING] < len(order.passes_VK) * layers:
        place = state.progress[FETCHING]
        # Fetches begin in order: where one must wait, so do all after it.
        if state.progress[ATTENDED] < max(place - model.prefetch, 0):
            return
        kind, m, layer = _cell(place, order)
        if model.keeps_slots and place >= layers:
            # The slots of this layer are in use until its cell of the pass before has ended.
            before = place // layers - 1
            k = order.end - 1 - layer if order.passes_VK[before, 0] == 1 else layer - order.first
            if state.progress[ENDED] < before * layers + k:
                return
        for g in range(state.host_G.shape[0]):
            seconds = work.host_KMLG[kind, m, layer, g]
            if seconds > 0:
                begin = max(state.host_G[g], state.clock[0])
                state.host_G[g] = begin + seconds
                state.fetched_NG2[place, g, 0] = begin
                state.fetched_NG2[place, g, 1] = begin + seconds
        state.queued_G4[:] += work.direct_KMLG4[kind, m, layer]
        state.progress[FETCHING] += 1


@kernel
def _cell(place: int, order: Any) -> Any:
    """Kind, micro-step and layer of a place."""
    v, k = divmod(place, order.end - order.first)
    kind, m = order.passes_VK[v]
    return kind, m, (order.end - 1 - k if kind == 1 else order.first + k)


@kernel
def _wait(state: Any, part: int, until: float) -> None:
    """Let time pass until this moment, in which the links are free."""
    seconds = until - state.clock[0]
    if seconds > 0:
        _elapse(state, part, seconds, seconds)


@kernel
def _elapse(state: Any, part: int, seconds: float, capacity: float) -> None:
    """Let time pass in which the links have `capacity` seconds for fetches, and what is left of it for gradients."""
    state.clock[0] += seconds
    state.parts_X[part] += seconds
    if capacity <= 0:
        return
    # A rank has four links: out to and in from other nodes, and the same within its node. Fetches go before gradients:
    # a cell waits for the former, only the optimizer for the latter.
    for g in range(state.queued_G4.shape[0]):
        for k in range(4):
            used = min(capacity, state.queued_G4[g, k])
            state.queued_G4[g, k] -= used
            state.owed_G4[g, k] = max(0.0, state.owed_G4[g, k] - (capacity - used))


@kernel
def _attend(state: Any, attention_s: float, layer_s: float, rate: float) -> None:
    """Attention and the fixed cost of a pass over a layer; the links are free for a share `rate` of them."""
    _elapse(state, ATTENTION, attention_s, rate * attention_s)
    _elapse(state, FIXED, layer_s, rate * layer_s)


@kernel
def _until(seconds: float, phase_s: float, rate: float) -> float:
    """When a link has done so many seconds of work, free for a share `rate` of the phase and for all time after."""
    if seconds <= rate * phase_s:
        return seconds / rate
    return phase_s + seconds - rate * phase_s
