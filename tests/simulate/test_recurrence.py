"""The recurrence against a play of events, by hand, and what must hold of any schedule.

The play knows nothing of recurrences: slow, and meant to be read. Every rank runs a program of its own; ranks meet in
all-to-alls. A copy engine and four links per rank have queues of jobs. Time goes to the next moment at which something
ends.
"""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foreroute.costs.model import PASSES
from foreroute.simulate.engine import run
from tests.simulate.simulate_cases import random_work, rules

CRUMB = 1e-12


class Player:
    """A group: G ranks, their copy engines and links."""

    def __init__(self, work, rules, passes, ready_s):
        self.work, self.rules, self.ready_s = work, rules, ready_s
        micro_steps, layers = work.all_to_all_ML.shape
        self.order = [(way, m) for m in range(micro_steps) for way in range(len(passes))]
        self.layers = list(range(layers)), list(reversed(range(layers)))  # of the ways forward and back
        self.cells = [(way, m, layer) for way, m in self.order for layer in self.layers[way]]
        self.ranks = work.head_MG.shape[1]
        self.attended, self.served = set(), set()  # places
        self.released = set()
        self.copies = [[] for _ in range(self.ranks)]  # of [place, seconds left]
        self.links = {(g, k): [] for g in range(self.ranks) for k in range(4)}
        self.gradients = {(g, k): 0.0 for g in range(self.ranks) for k in range(4)}
        self.programs = [self.program(g, passes) for g in range(self.ranks)]
        self.at = [0] * self.ranks  # instruction of each rank
        self.left = [None] * self.ranks  # seconds left of it
        self.arrived = [False] * self.ranks

    def program(self, g, passes):
        work, program = self.work, []
        place = itertools.count()
        for way, m in self.order:
            program.append(("planned", m))
            head = work.head_MG[m].max()
            if way == 1:
                program.append(("meet", 2 * head))
            for layer in self.layers[way]:
                cell, leg = next(place), work.all_to_all_ML[m, layer]
                forwards, backwards = passes[way]
                for i in range(forwards + backwards):
                    side = int(i >= forwards)
                    attention = work.attention_MG2[m, g, side] + work.layer_s
                    experts = work.experts_MLG2[m, layer, g, side]
                    if side == 0:
                        program += [("work", attention), ("meet", 0.0)]
                        program += [("attended", cell)] if i == 0 else []
                        program += [("all-to-all", leg)]
                        program += [("fetched", cell)] if i == 0 else []
                        program += [("work", experts), ("all-to-all", leg)]
                    else:
                        program += [("all-to-all", leg), ("work", experts), ("meet", 0.0), ("gradients", m, layer)]
                        program += [("all-to-all", leg), ("work", attention), ("meet", 0.0)]
                program.append(("served", cell))
            if way == 0:
                program.append(("meet", head))
        program.append(("gradients home",))
        return program

    def release(self):
        """Start what may start, in the order of the cells."""
        for place, (way, m, layer) in enumerate(self.cells):
            if place in self.released:
                continue
            if max(place - self.rules.prefetch, 0) not in self.attended:
                return False
            same = [p for p in range(place) if self.cells[p][2] == layer]
            if self.rules.keeps_slots and same and same[-1] not in self.served:
                return False
            self.released.add(place)
            for g in range(self.ranks):
                if self.work.host_KMLG[way, m, layer, g] > 0:
                    self.copies[g].append([place, self.work.host_KMLG[way, m, layer, g]])
                for k in range(4):
                    self.links[g, k].append([place, self.work.direct_KMLG4[way, m, layer, g, k]])
            return True
        return False

    def is_there(self, g, place):
        copied = all(job[0] != place for job in self.copies[g])
        linked = all(job[0] > place for queue in self.links.values() for job in queue)
        return place in self.released and copied and linked

    def advance(self, g, now):
        """Begin the next instruction of a rank, or end the one that it is at; whether anything changed."""
        if self.at[g] == len(self.programs[g]):
            return False
        what, *rest = self.programs[g][self.at[g]]
        if what == "work":
            if self.left[g] is None:
                self.left[g] = rest[0]
                return True
            if self.left[g] > CRUMB:
                return False
        elif what in ("meet", "all-to-all"):
            if not self.arrived[g]:
                self.arrived[g] = True
                return True
            if not all(self.arrived[r] and self.at[r] == self.at[g] for r in range(self.ranks)):
                return False
            if self.left[g] is None:
                self.left = [rest[0]] * self.ranks
                return True
            if self.left[g] > CRUMB:
                return False
            for r in range(self.ranks):  # all together
                self.at[r], self.left[r], self.arrived[r] = self.at[r] + 1, None, False
            return True
        elif what == "fetched":
            if not self.is_there(g, rest[0]):
                return False
        elif what == "planned":
            if now < self.ready_s - CRUMB:
                return False
        elif what == "attended":
            self.attended.add(rest[0])
        elif what == "served":
            self.served.add(rest[0])
        elif what == "gradients":
            if g == 0:
                for r, k in self.gradients:
                    self.gradients[r, k] += self.work.gradient_MLG4[(*rest, r, k)]
        elif what == "gradients home" and (any(self.gradients.values()) or any(self.links.values())):
            return False
        self.at[g], self.left[g] = self.at[g] + 1, None
        return True

    def exchanging(self):
        return any(
            self.at[g] < len(self.programs[g])
            and self.programs[g][self.at[g]][0] == "all-to-all"
            and self.left[g] is not None
            for g in range(self.ranks)
        )

    def jobs(self):
        """Seconds left of everything that makes progress now, and how to make it."""
        for g in range(self.ranks):
            if self.left[g] is not None:
                yield self.left[g], ("rank", g)
            if self.copies[g]:
                yield self.copies[g][0][1], ("copy", g)
        if not self.exchanging():
            for key in self.links:
                if self.links[key]:
                    yield self.links[key][0][1], ("link", key)
                elif self.gradients[key]:
                    yield self.gradients[key], ("gradient", key)

    def progress(self, seconds):
        for _, (what, key) in list(self.jobs()):
            if what == "rank":
                self.left[key] -= seconds
            elif what == "gradient":
                self.gradients[key] -= seconds
            else:
                (self.copies[key] if what == "copy" else self.links[key])[0][1] -= seconds

    def tidy(self):
        """Take away what has ended."""
        changed = False
        for queue in (*self.copies, *self.links.values()):
            if queue and queue[0][1] <= CRUMB:
                queue.pop(0)
                changed = True
        for key, left in self.gradients.items():
            if 0 < left <= CRUMB or left < 0:
                self.gradients[key] = 0.0
                changed = True
        return changed


def play(work, rules, passes, ready_s):
    """Seconds at which all has ended."""
    player, now = Player(work, rules, passes, ready_s), 0.0
    while True:
        changed = True
        while changed:
            changed = player.tidy()
            for g in range(player.ranks):
                changed |= player.advance(g, now)
            while player.release():
                changed = True
        if all(at == len(player.programs[g]) for g, at in enumerate(player.at)):
            return now
        moments = [left for left, _ in player.jobs()]
        if ready_s > now + CRUMB:
            moments.append(ready_s - now)
        assert moments, "nothing moves, and somebody waits"
        seconds = min(moment for moment in moments if moment > 0)
        player.progress(seconds)
        now += seconds


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    pass_index=st.integers(0, 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    transfers=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    gradients=st.sampled_from([0.0, 1.0, 6.0]),
    planned=st.sampled_from([0.0, 1.5]),
    prefetch=st.sampled_from([0, 1, 2, 3, 9]),
    keeps=st.booleans(),
)
@example(
    seed=0, pass_index=1, shape=(3, 3, 2), transfers=1.0, gradients=1.0, planned=0.0, prefetch=3, keeps=True
)  # fetches for the way forward wait for slots of the way back
def test_equals_a_play_of_events(seed, pass_index, shape, transfers, gradients, planned, prefetch, keeps):
    micro_steps, layers, ranks = shape
    work = random_work(seed, micro_steps=micro_steps, layers=layers, ranks=ranks, transfers=transfers)
    # many gradients are still on their way when all else has ended
    work = work._replace(gradient_MLG4=work.gradient_MLG4 * (0.0 if pass_index == 0 else gradients))
    how = rules(prefetch=prefetch, keeps_slots=keeps)
    found = run(work, how, pass_index=pass_index, ready_s=planned)
    expected = play(work, how, PASSES[pass_index], planned)
    assert found.end_s == pytest.approx(expected, abs=1e-9)
    assert found.parts_X.sum() == pytest.approx(found.end_s)


def one_cell(leg_s):
    """A cell whose attention and experts take 1 each, and its all-to-alls this long; nothing is moved."""
    work = random_work(0, micro_steps=1, layers=1)
    ones = {name: np.ones_like(getattr(work, name)) for name in ("attention_MG2", "experts_MLG2")}
    legs = {"all_to_all_ML": np.array([[leg_s]]), "head_MG": np.zeros_like(work.head_MG), "layer_s": 0.0}
    return work._replace(**ones, **legs).without_transfers()


@pytest.mark.parametrize(
    ("overlap", "expected"),
    # two all-to-alls of 0.75
    [(0.0, 3.5), (0.25, 3.0), (0.75, 2.0), (1.0, 2.0)],
)
def test_overlap_hides_all_to_alls_behind_its_share_of_computing(overlap, expected):
    assert run(one_cell(0.75), rules(overlap=overlap), pass_index=0).end_s == pytest.approx(expected)


def test_fetches_share_the_links_with_all_to_alls_that_are_hidden():
    """Computing of 1 + 1 hides 0.75 of all-to-alls, so links have 5/8 of it left: 0.5 takes 0.8 of the experts."""
    work = one_cell(0.375)
    work.direct_KMLG4[0, 0, 0, 1, 2] = 0.5
    found = run(work, rules(overlap=1.0), pass_index=0)
    assert found.end_s == pytest.approx(1 + 0.8 + 1)
