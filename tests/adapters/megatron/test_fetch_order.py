"""When weights of replicas travel in Megatron's schedules: behind rows, and ahead of their cell."""

import contextlib
from unittest import mock

import pytest
import torch.distributed as dist

from foreroute.adapters.megatron.planned_layer import PlannedLayer
from foreroute.ep.transfer.peers import PeerGroup
from tests.adapters.megatron.executed_plans import Planned
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, ExecutionCase


def fetches_of_a_step(at):
    with at.execute() as execution:
        at.step()
    return [each for each in execution.transfers if each.kind == "fetch" and each.host_bytes + each.direct_bytes]


@pytest.mark.slow
@on_ranks(2)
def test_weights_stand_behind_the_rows_of_their_cell_and_are_under_way_when_it_comes():
    """On one communicator, whatever is posted first travels first.

    Ahead are those of the first step too, but for a layer's first cell, before which its weights may still be gathered.
    """
    for kind, recompute in (("planned", "uniform"), ("shared", "selective"), ("shared", "none")):
        at = Planned.of(ExecutionCase(Cell(ep=2, layers=3, recompute=recompute)), kind=kind)
        cells = int((at.plan.num_replicas_ML > 0).sum())
        for _ in range(2):
            with told() as log:
                fetched = fetches_of_a_step(at)
            firsts = {each.cell.layer: each for each in reversed(fetched)}
            late = [each for each in fetched if not each.prefetched and each is not firsts[each.cell.layer]]
            assert not late, (kind, recompute, late)
            in_front = [place for place, what in enumerate(log) if what == "weights" and not rows_before(log, place)]
            assert not in_front, (kind, recompute, log[: in_front[0] + 1])
            assert 0 < log.count("weights") <= (cells if kind == "planned" else 2 * cells), (kind, recompute)


@pytest.mark.slow
@on_ranks(4)
def test_some_are_within_the_chunks_of_a_pipeline():
    """What comes behind a chunk is the schedule's affair. Slots then go from micro-step to micro-step and back."""
    for kind in ("planned", "shared"):
        at = Planned.of(ExecutionCase(Cell(ep=2, layers=8, pp=2, vpp=2, recompute="selective")), kind=kind)
        assert any(each.prefetched for each in fetches_of_a_step(at))


def rows_before(log, place):
    since = max(at for at, what in enumerate(log[:place]) if what == "layer")
    return "rows" in log[since:place]


@contextlib.contextmanager
def told():
    """In which order layers begin, and rows and weights are posted."""
    log, post, all_to_all, fill = [], PeerGroup.post, dist.all_to_all_single, PlannedLayer._preprocess

    def posting(peers, sends, receives, what):
        if what.startswith("fetching"):
            log.append("weights")
        return post(peers, sends, receives, what)

    with (
        mock.patch.object(PeerGroup, "post", posting),
        mock.patch.object(dist, "all_to_all_single", lambda *a, **k: log.append("rows") or all_to_all(*a, **k)),
        mock.patch.object(PlannedLayer, "_preprocess", lambda *a: log.append("layer") or fill(*a)),
    ):
        yield log
