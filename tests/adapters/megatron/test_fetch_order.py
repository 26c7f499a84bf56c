"""When weights of replicas travel in Megatron's schedules: behind rows, ahead of their cell, as seldom as can be.

Slots that are kept for a layer and slots that all layers share give the same bits.
"""

import contextlib
import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foreroute.adapters.megatron.planned_layer import PlannedLayer
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from tests.adapters.megatron.executed_plans import Planned, rows_off_plan
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, ExecutionCase
from tests.adapters.megatron.training_step import moe_layers

RECOMPUTE = ("none", "selective", "uniform")
PATHS = ("host", "direct")


@on_ranks(2)
def test_a_replica_travels_once_in_a_step_to_a_slot_that_is_kept():
    """However often its cell runs, by either path. To slots that layers share, it may once more for backward."""
    for recompute in RECOMPUTE:
        kept = Planned.of(ExecutionCase(Cell(ep=2, layers=4, recompute=recompute)))
        shared = dataclasses.replace(kept, plan=on_shared_slots(kept.plan))
        assert kept.plan.slots == "layer"
        num_replicas, num_fetched = len(kept.plan.hosts.fetched_R), int(kept.plan.hosts.fetched_R.sum())
        assert 0 < num_fetched < num_replicas
        losses, grads = None, None
        for path in PATHS:
            kept.routed.use(TransferOptions(paths=path))
            for at in (kept, shared):
                (found_losses, found), transfers = outcome_of(at)
                rows = rows_of(at, transfers, path)
                assert rows == num_fetched if at is kept else num_replicas < rows <= 2 * num_replicas, (recompute, path)
                losses, grads = losses or found_losses, grads or found
                assert found_losses == losses
                assert all(torch.equal(found[name], grads[name]) for name in grads)


def on_shared_slots(plan):
    """The same replicas in slots that keep nothing."""
    hosts = plan.hosts._replace(fetched_R=np.ones_like(plan.hosts.fetched_R))
    return dataclasses.replace(plan, slots="shared", hosts=hosts)


def outcome_of(at):
    """Losses and gradients of a step, and its transfers."""
    with at.execute() as execution:
        found = at.step()
    assert rows_off_plan(at.routed, execution, at.counts_MLGE) == 0
    return found, execution.transfers


def fetched_in(transfers):
    """Those that brought weights to this rank."""
    return [each for each in transfers if each.kind == "fetch" and each.host_bytes + each.direct_bytes]


def rows_of(at, transfers, path):
    """Rows that reached all ranks by one path, and none by the other."""
    expert = moe_layers(at.chunks)[0].experts.local_experts[0]
    bytes_P = torch.tensor([sum(getattr(each, f"{name}_bytes") for each in fetched_in(transfers)) for name in PATHS])
    dist.all_reduce(bytes_P)
    found = dict(zip(PATHS, bytes_P.tolist(), strict=True))
    assert [name for name, num_bytes in found.items() if num_bytes] == [path]
    return found[path] / sum(parameter.nbytes for parameter in expert.parameters())


@on_ranks(2)
def test_weights_are_under_way_when_their_cell_comes():
    """In the first step too, but those of a layer's first cell, before which its weights may still be gathered."""
    for kind in ("planned", "shared"):
        for recompute in RECOMPUTE:
            at = Planned.of(ExecutionCase(Cell(ep=2, layers=4, recompute=recompute)), kind=kind)
            for _ in range(2):
                fetched = fetched_in(outcome_of(at)[1])
                firsts = {each.cell.layer: each for each in reversed(fetched)}
                late = [each for each in fetched if not each.prefetched and each is not firsts[each.cell.layer]]
                assert fetched
                assert not late, late


@pytest.mark.slow
@on_ranks(4)
def test_some_are_within_the_chunks_of_a_pipeline():
    """What comes behind a chunk is the schedule's affair. Slots then go from micro-step to micro-step and back."""
    for kind in ("planned", "shared"):
        at = Planned.of(ExecutionCase(Cell(ep=2, layers=8, pp=2, vpp=2, recompute="selective")), kind=kind)
        for _ in range(2):
            assert any(each.prefetched for each in fetched_in(outcome_of(at)[1]))


@on_ranks(2)
def test_weights_stand_behind_the_rows_of_their_cell():
    """On one communicator, whatever is posted first travels first."""
    for kind in ("planned", "shared"):
        for recompute in RECOMPUTE:
            at = Planned.of(ExecutionCase(Cell(ep=2, layers=4, recompute=recompute)), kind=kind)
            log = []
            with told(log), at.execute():
                at.step()
            in_front = [place for place, what in enumerate(log) if what == "weights" and not rows_before(log, place)]
            assert not in_front, (kind, recompute, log[: in_front[0] + 1])
            cells = int((at.plan.num_replicas_ML > 0).sum())
            assert 0 < log.count("weights") <= (cells if kind == "planned" else 2 * cells), (kind, recompute)


def rows_before(log, place):
    """Whether rows have left since the last layer began."""
    since = max(at for at, what in enumerate(log[:place]) if what == "layer")
    return "rows" in log[since:place]


@contextlib.contextmanager
def told(log):
    """Writes down in which order layers begin, and rows and weights are posted."""
    post, all_to_all, fill = PeerGroup.post, dist.all_to_all_single, PlannedLayer._preprocess

    def posting(peers, sends, receives, what):
        if what.startswith("fetching"):
            log.append("weights")
        return post(peers, sends, receives, what)

    with (
        mock.patch.object(PeerGroup, "post", posting),
        mock.patch.object(dist, "all_to_all_single", lambda *a, **k: log.append("rows") or all_to_all(*a, **k)),
        mock.patch.object(PlannedLayer, "_preprocess", lambda *a: log.append("layer") or fill(*a)),
    ):
        yield
