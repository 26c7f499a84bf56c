"""When everything happens in recompute or update of one expert-parallel group: the recurrence over its cells.

The ranks of a group meet in every all-to-all, so between two of them one clock is enough for all; the copy
engines and the links have clocks of their own. Events are taken in the order of their causes, so
each is computed once and exactly. Times are seconds from the start. Compiled.

- A pass over a cell: attention and router | dispatch | experts | combine; the reverse in a backward pass. Each part
  begins when the one before has ended on all ranks of the group.
- The copy engine of a rank serves its fetches one after the other. A fetch begins when its slots are free and the cell
  `prefetch` places before it has ended its attention. Experts of a rank begin when its own fetches are there.
- A link that all-to-alls use carries direct fetches and gradients while no all-to-all runs, fetches first, in the order
  of cells. All ranks wait for all direct fetches of a cell.
- Gradients return in the background; what is left of them at the end is waited for.
- `overlap` times its computing time, a pass hides its all-to-alls behind; for so long the links are taken.

A *place* is a cell in the order of execution: micro-step by micro-step through all layers, in the update forward and
back. Arrays over both ways have the axis K: 0 forward, 1 back.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import PASSES
from foreroute.kernels import kernel

Floats = NDArray[np.float64]

PARTS = ("attention", "all-to-all", "experts", "fixed", "exposed transfers", "output head", "waiting for the plan")
"""Parts of the time of recompute and update, in this order."""
ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED, HEAD, PLAN = map(np.int64, range(len(PARTS)))
"""Their places. numba would make a type of each plain number, and compile what takes it once for each."""
FETCHING, ATTENDED, ENDED = range(3)
"""Indices of `progress`: the next place to fetch for, the last that ended its attention, the last that ended."""


class PassWork(NamedTuple):
    """Work of a group in one pass of a step, in seconds: of its ranks, of the all-to-alls, and of what moves beside.

    Attributes:
        attention_MG2: [M, G, 2], attention and all that is dense in a layer, forward and backward.
        head_MG: [M, G], the output head in a forward pass; backward takes twice as long.
        all_to_all_ML: [M, L], one all-to-all.
        rows_ML2: [M, L, 2], rows that all ranks together send in it, over their links inside nodes and over NICs.
        experts_MLG2: [M, L, G, 2], the experts, forward and backward.
        layer_s: fixed, of one pass over one layer.
        host_KMLG: [2, M, L, G], fetches by the copy engine from host memory, by way.
        direct_KMLG4: [2, M, L, G, 4], fetches over NIC out, NIC in, node link out, node link in, by way.
        gradient_MLG4: [M, L, G, 4], gradients that return over these links after the backward pass.
    """

    attention_MG2: Floats
    head_MG: Floats
    all_to_all_ML: Floats
    rows_ML2: Floats
    experts_MLG2: Floats
    layer_s: float
    host_KMLG: Floats
    direct_KMLG4: Floats
    gradient_MLG4: Floats

    def forward_alone(self) -> PassWork:
        """The same without a way back: nothing is fetched on it, and no gradient returns."""
        is_forth = np.array([1.0, 0.0])
        return self._replace(
            host_KMLG=self.host_KMLG * is_forth[:, None, None, None],
            direct_KMLG4=self.direct_KMLG4 * is_forth[:, None, None, None, None],
            gradient_MLG4=np.zeros_like(self.gradient_MLG4),
        )

    def without_transfers(self) -> PassWork:
        """The same where weights and gradients move at no cost."""
        free = {name: np.zeros_like(getattr(self, name)) for name in ("host_KMLG", "direct_KMLG4", "gradient_MLG4")}
        return self._replace(**free)


class ExecutionModel(NamedTuple):
    """How the cluster executes.

    Attributes:
        overlap: share of its computing time behind which a pass over a cell hides its all-to-alls, 0 to 1.
        prefetch: cells that are fetched ahead.
        keeps_slots: slots belong to layers, and are in use until the last cell of the layer has ended.
    """

    overlap: float
    prefetch: int
    keeps_slots: bool


class GroupRun(NamedTuple):
    """Recompute or update of one group.

    Attributes:
        parts_X: [`PARTS`], seconds; they add up to `end_s`.
        end_s: seconds from the start to the last event, gradients included.
        fetched_NG2: [places, G, 2], begin and end of each rank's copies from the host.
    """

    parts_X: Floats
    end_s: float
    fetched_NG2: Floats


# One moment. `clock` holds its seconds, `progress` three places. `queued_G4` and `owed_G4` are seconds of direct
# fetches and of gradients that the links have not carried yet; `host_G` is when each copy engine is free.
State = namedtuple("State", "clock progress queued_G4 owed_G4 host_G parts_X fetched_NG2")


def run(work: PassWork, model: ExecutionModel, *, pass_index: int, ready_s: float = 0.0) -> GroupRun:
    """Run recompute or update, by position in `costs.PASSES`; nothing runs before the plan is there, at `ready_s`."""
    # one kind of array: kernels are compiled once
    whole = PassWork._make(np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one for one in work)
    return GroupRun(*_run(np.array(PASSES[pass_index], np.int64), float(ready_s), whole, model))


@kernel
def _run(passes_KF: Any, ready_s: float, work: Any, model: Any) -> Any:
    """Go through all places. `passes_KF`: forward and backward passes over each cell, on the way forward and back."""
    ways, (num_micro_steps, layers) = len(passes_KF), work.all_to_all_ML.shape
    state = _initial_state(num_micro_steps * ways * layers, work.head_MG.shape[1])
    place = np.int64(0)
    _elapse(state, PLAN, ready_s, ready_s)
    for m in range(num_micro_steps):
        head_s = work.head_MG[m].max()
        for way in range(ways):
            forwards, backwards = passes_KF[way]
            if way == 1:
                _elapse(state, HEAD, 2 * head_s, 2 * head_s)
            for _ in range(layers):
                # the way back of an update runs every cell forward anew, then backward: activations were not kept
                for i in range(forwards + backwards):
                    _pass_cell(state, place, i, i >= forwards, ways, work, model)
                state.progress[ENDED] = place
                _release(state, ways, work, model)
                place += 1
            if way == 0:
                _elapse(state, HEAD, head_s, head_s)
    # What links still have to carry when the last pass has ended is hidden by nothing.
    tail = max(0.0, (state.queued_G4 + state.owed_G4).max())
    state.parts_X[EXPOSED] += tail
    return state.parts_X, state.clock[0] + tail, state.fetched_NG2


@kernel
def _initial_state(num_places: int, ranks: int) -> Any:
    """Nothing is fetched, attended or ended."""
    progress = np.full(3, -1, np.int64)
    progress[FETCHING] = 0
    return State(
        np.zeros(1),
        progress,
        np.zeros((ranks, 4)),
        np.zeros((ranks, 4)),
        np.zeros(ranks),
        np.zeros(len(PARTS)),
        np.zeros((num_places, ranks, 2)),
    )


@kernel
def _pass_cell(state: Any, place: int, i: int, backward: bool, ways: int, work: Any, model: Any) -> None:
    """One pass over one cell, the i-th at this place."""
    side = 1 if backward else 0
    _, m, layer = _cell(place, ways, work)
    attention_s = work.attention_MG2[m, :, side].max()
    experts_s = work.experts_MLG2[m, layer, :, side].max()
    # What is hidden shortens both all-to-alls alike, and takes the links from fetches while the ranks compute.
    hidden = min(2 * work.all_to_all_ML[m, layer], model.overlap * (attention_s + experts_s))
    all_to_all_s = work.all_to_all_ML[m, layer] - hidden / 2
    computing = attention_s + experts_s + work.layer_s
    # hidden all-to-alls take the links for their whole time, spread evenly over the computing
    rate = 1 - hidden / computing if computing > 0 else 1.0
    if backward:
        _elapse(state, ALL_TO_ALL, all_to_all_s, 0.0)
        _elapse(state, EXPERTS, experts_s, rate * experts_s)
        # from here the weights' gradients are known, and may leave while all else goes on
        state.owed_G4[:] += work.gradient_MLG4[m, layer]
        _elapse(state, ALL_TO_ALL, all_to_all_s, 0.0)
        _attend(state, attention_s, work.layer_s, rate)
    else:
        _attend(state, attention_s, work.layer_s, rate)
        if i == 0:
            state.progress[ATTENDED] = place
            _release(state, ways, work, model)
        _elapse(state, ALL_TO_ALL, all_to_all_s, 0.0)
        exposed_s = _exposed(state, place, ways, experts_s, rate, work) if i == 0 else 0.0
        _elapse(state, EXPERTS, experts_s, rate * experts_s)
        _elapse(state, EXPOSED, exposed_s, exposed_s)
        _elapse(state, ALL_TO_ALL, all_to_all_s, 0.0)


@kernel
def _exposed(state: Any, place: int, ways: int, experts_s: float, rate: float, work: Any) -> float:
    """Seconds that the experts of the first pass take longer, since they wait for what is fetched for them."""
    _, m, layer = _cell(place, ways, work)
    direct_s = _direct_wait(state, place, ways, experts_s, rate, work)
    longest = 0.0
    for g in range(state.host_G.shape[0]):
        # a rank that does little may wait long without delaying the others
        wait_s = max(direct_s, state.fetched_NG2[place, g, 1] - state.clock[0])
        longest = max(longest, wait_s + work.experts_MLG2[m, layer, g, 0])
    return longest - experts_s


@kernel
def _direct_wait(state: Any, place: int, ways: int, experts_s: float, rate: float, work: Any) -> float:
    """Seconds until the direct fetches of a place, and of those before it, have all arrived.

    Links serve places in order, so what is queued less what was queued for later places is in front of them.
    """
    direct_s = 0.0
    for g in range(state.host_G.shape[0]):
        for k in range(4):
            left = state.queued_G4[g, k]
            for later in range(place + 1, state.progress[FETCHING]):
                c, n, la = _cell(later, ways, work)
                left -= work.direct_KMLG4[c, n, la, g, k]
            # Adding the same seconds and taking them off again leaves a rounding error of this size.
            if left > 1e-15:
                direct_s = max(direct_s, _until(left, experts_s, rate))
    return direct_s


@kernel
def _release(state: Any, ways: int, work: Any, model: Any) -> None:
    """Begin all fetches whose time has come."""
    layers = work.all_to_all_ML.shape[1]
    while state.progress[FETCHING] < len(state.fetched_NG2):
        place = state.progress[FETCHING]
        # Fetches begin in order: where one must wait, so do all after it.
        if state.progress[ATTENDED] < max(place - model.prefetch, 0):
            return
        way, m, layer = _cell(place, ways, work)
        if model.keeps_slots and place >= layers:
            # The slots of this layer are in use until its cell has ended on the way before, back where this is forward.
            first = (place // layers - 1) * layers
            before = first + layer if ways == 1 or way == 1 else first + layers - 1 - layer
            if state.progress[ENDED] < before:
                return
        for g in range(state.host_G.shape[0]):
            seconds = work.host_KMLG[way, m, layer, g]
            if seconds > 0:
                # copies of a rank share one engine, whatever cell they are for
                begin = max(state.host_G[g], state.clock[0])
                state.host_G[g] = begin + seconds
                state.fetched_NG2[place, g, 0] = begin
                state.fetched_NG2[place, g, 1] = begin + seconds
        state.queued_G4[:] += work.direct_KMLG4[way, m, layer]
        state.progress[FETCHING] += 1


@kernel
def _cell(place: int, ways: int, work: Any) -> Any:
    """Way (0 forward, 1 back), micro-step and layer of a place."""
    layers = work.all_to_all_ML.shape[1]
    turn, k = divmod(place, layers)
    m, way = divmod(turn, ways)
    return way, m, (layers - 1 - k if way == 1 else k)


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
    """When a link has done this many seconds of work, free for a share `rate` of the phase and for all time after."""
    if seconds <= rate * phase_s:
        return seconds / rate
    return phase_s + seconds - rate * phase_s
