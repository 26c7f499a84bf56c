"""How time passes on one pipeline stage of the recurrence of `engine.py`, compiled."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from foreroute.kernels import kernel

ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED, HEAD, PLAN, BUBBLE = range(8)

# Of one pipeline stage. `clock` holds one number, `marks` three: places released, attended and served so far.
Lane = namedtuple("Lane", "clock marks queued_G4 owed_G4 host_G parts_X times_NX fetched_NG2 bursts_N")


@kernel
def wait(lane: Any, part: int, until: float) -> None:
    seconds = until - lane.clock[0]
    if seconds > 0:
        elapse(lane, part, seconds, seconds)


@kernel
def elapse(lane: Any, part: int, seconds: float, capacity: float) -> None:
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


@kernel
def attend(lane: Any, attention_s: float, layer_s: float, rate: float) -> None:
    elapse(lane, ATTENTION, attention_s, rate * attention_s)
    elapse(lane, FIXED, layer_s, rate * layer_s)


@kernel
def until(seconds: float, phase_s: float, rate: float) -> float:
    """When so much work of a link is done that has a part of the phase, and all of the time after it."""
    if seconds <= rate * phase_s:
        return seconds / rate
    return phase_s + seconds - rate * phase_s


@kernel
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
