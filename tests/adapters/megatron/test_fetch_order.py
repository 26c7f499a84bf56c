"""Fetches that are begun ahead: always those of the cell that is visited, whatever order was expected."""

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from foreroute.adapters.megatron.plan_execution.layer import PlannedLayer
from foreroute.ep.transfer import Cell, Fetch
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.replica_weights import DirectWeights
from tests.adapters.megatron.executed_plans import Planned, make_plan, rows_off_plan, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell as Split
from tests.adapters.megatron.grid import ExecutionCase


@dataclasses.dataclass
class Sent:
    """Stands for a fetch."""

    cell: Cell
    is_over: bool = False

    def wait(self):
        assert not self.is_over, "waited for twice"
        self.is_over = True
        return {"cell": self.cell}


class Sending(DirectWeights):
    """Nothing moves; `begun` has the fetches of cells with replicas."""

    def __init__(self, replicated, orders):
        super().__init__(SimpleNamespace(size=1))
        self.begun = []
        num_replicas_ML = np.array([[(m, n) in replicated for n in range(4)] for m in range(3)], np.int64)
        topology = SimpleNamespace(num_ranks=1)
        made = SimpleNamespace(topology=topology, shape=(3, 4, 1), num_replicas_ML=num_replicas_ML)
        self._orders[3, True] = orders
        self.begin_step(7, made, SimpleNamespace(cell=lambda m, layer: None), updating=True)

    def _begin(self, cell):
        if not self._has_replicas(cell):
            return Fetch(cell, dict)
        self.begun.append(Sent(cell))
        return self.begun[-1]


@on_ranks(1)
def test_every_visit_gets_its_own_cell():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        cells = list(itertools.product(range(3), range(4)))
        replicated = {cell for cell in cells if rng.random() < 0.6}
        visits = [cells[i] for i in rng.integers(len(cells), size=40)]
        expected = list(visits)
        for _ in range(rng.integers(3)):
            expected[rng.integers(40)] = cells[rng.integers(len(cells))]
        expected = expected[: rng.integers(41)] if rng.random() < 0.5 else expected
        others = [visits[: rng.integers(40)], [cells[i] for i in rng.integers(len(cells), size=40)]][: rng.integers(3)]
        weights = Sending(replicated, [expected, *others])
        for visit in visits:
            found = weights.fetch(Cell(7, *visit), {})
            assert found.wait() == ({"cell": (7, *visit)} if visit in replicated else {})
        weights.end_step()
        assert all(sent.is_over for sent in weights.begun), "nothing is left on its way"
        assert weights.num_fetches == sum(visit in replicated for visit in visits)
        if expected == visits and not others:
            first = {layer: visits.index(next(v for v in visits if v[1] == layer)) for layer in {v[1] for v in visits}}
            missed = sum(visits[place] in replicated for place in first.values())
            assert weights.num_fetches - weights.num_ahead == missed, "all but those of a layer's first visit are ahead"


@pytest.mark.slow
@on_ranks(2)
def test_steps_after_the_first_fetch_ahead():
    require_fetches_ahead(
        [{"ep": 2, "layers": 2}, {"ep": 2, "layers": 2, "recompute": "uniform", "dispatcher": "allgather"}]
    )


@pytest.mark.slow
@on_ranks(4)
def test_so_they_do_between_pipeline_stages():
    require_fetches_ahead([{"ep": 2, "layers": 4, "pp": 2, "vpp": 2, "recompute": "selective"}])


def require_fetches_ahead(splits):
    """With recomputation and virtual stages too: in a step, only what a layer needs first is not under way."""
    for split in splits:
        found = trained(ExecutionCase(Split(**split)), "planned")
        layers = split["layers"] // split.get("pp", 1)
        (fetches, ahead), *later = found["fetches"]
        assert (fetches > layers, ahead) == (True, 0)
        for fetches, ahead in later:
            assert fetches > 2 * layers
            assert fetches - ahead <= layers, (split, fetches, ahead)


@pytest.mark.slow
@on_ranks(2)
def test_forward_only_and_updates_take_turns():
    """As recompute and update of an RL step do, the former without `no_grad`: autograd does not tell them apart."""
    at = Planned.of(ExecutionCase(Split(ep=2, layers=2)))
    for number in range(3):
        for forward_only in (True, False):
            with at.execute() as execution:
                at.step(forward_only=forward_only)
            fetches, ahead = execution.fetches
            # not what a layer needs first, nor the visit before which the two orders part
            assert number == 0 or fetches - ahead <= len(at.routed.layers) + 1, (number, forward_only, fetches, ahead)


@pytest.mark.slow
@on_ranks(2)
def test_steps_of_other_numbers_of_micro_batches():
    """Each begins as if none had been before: the order of a longer one has cells that a shorter one has not."""
    whole = Planned.of(ExecutionCase(Split(ep=2, layers=2)))
    found = []
    for number in (3, 2, 3, 1, 2):
        shards = whole.shards[:number]
        made, counts_MLGE, _ = make_plan(whole.routed, None, "planned", 0, shards, None)
        at = dataclasses.replace(
            whole, batches=whole.batches[:number], shards=shards, plan=made, counts_MLGE=counts_MLGE
        )
        with at.execute() as execution:
            at.step()
        assert rows_off_plan(at.routed, execution, counts_MLGE) == 0
        found.append(execution.fetches[1] > 0)
    assert found == [False, False, True, False, True]


@on_ranks(2)
def test_weights_stand_behind_the_rows_of_their_cell():
    """On one communicator, whatever is posted first travels first. A cell is fetched twice, however often it runs."""
    for recompute in ("none", "selective", "uniform"):
        at = Planned.of(ExecutionCase(Split(ep=2, layers=2, recompute=recompute)))
        for number in range(2):
            log = []
            with told(log), at.execute() as execution:
                at.step()
            in_front = [place for place, what in enumerate(log) if what == "weights" and not rows_before(log, place)]
            assert not in_front, (recompute, number, log[: in_front[0] + 1])
            fetches, ahead = execution.fetches
            assert log.count("weights") == fetches == 2 * (at.plan.num_replicas_ML > 0).sum()
            assert (ahead > 0) == (number > 0)


def rows_before(log, place):
    """Whether rows have left since the last layer began."""
    since = max(at for at, what in enumerate(log[:place]) if what == "layer")
    return "rows" in log[since:place]


@contextlib.contextmanager
def told(log):
    """Writes down in which order layers begin, and rows and weights are posted."""
    begin, all_to_all, fill = PeerGroup.begin, dist.all_to_all_single, PlannedLayer._preprocess

    def beginning(peers, sends, receives, what):
        if what.startswith("fetching"):
            log.append("weights")
        return begin(peers, sends, receives, what)

    with (
        mock.patch.object(PeerGroup, "begin", beginning),
        mock.patch.object(dist, "all_to_all_single", lambda *a, **k: log.append("rows") or all_to_all(*a, **k)),
        mock.patch.object(PlannedLayer, "_preprocess", lambda *a: log.append("layer") or fill(*a)),
    ):
        yield
