"""What goes wrong between ranks: a step gets slower, or ends everywhere with an error. Never wrong, never hung."""

import gc
import itertools
import os
import re
import signal
import time
from contextlib import closing
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.host_memory import HostMemory, open_shared
from foreroute.errors import TransferError
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import begin, consensus, make_engine, peers, shards, walk
from tests.tiers import grid

MEMORY = Path("/dev/shm")
GONE_S = 3.0  # after which a rank is taken for dead


def leaked():
    """Shared memory of a process that is gone or of ours; other tests run at the same time."""
    return [path for path in sorted(MEMORY.glob("foreroute-*")) if is_ours_or_gone(int(path.name.split("-")[2]))]


def is_ours_or_gone(process):
    while process not in (0, os.getpid()):
        try:
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:
            return True
    return process == os.getpid()


def read_late(rank, plan, votes):
    """The last rank still reads host memory when the first one has new weights to publish."""
    homes = dict(enumerate(shards(plan, rank)))
    memory = HostMemory(RankConsensus(timeout_s=20.0), homes, 2)
    every = plan.home_LE, np.ones((*plan.home_LE.shape, 2), np.bool_)
    memory.publish(*every)
    row = memory.expert(0, int(np.flatnonzero(plan.home_LE[0] == 0)[0]))["down_proj"]
    before, after = row.clone(), 2 * row
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if not votes:
            patch.setattr(RankConsensus, "most", lambda consensus, mine, what: mine)
        if rank == 0:
            for tensor in homes[0].values():
                tensor.detach().mul_(2)
        end = time.monotonic() + (0.5 if votes else 20.0)
        while rank and torch.equal(row, before) and time.monotonic() < end:
            time.sleep(0.01)
        late = row.clone()
        memory.forget()
        memory.publish(*every)
    return torch.equal(late, before), torch.equal(row, after)


@pytest.mark.slow
def test_nothing_is_written_while_another_rank_still_reads(workers):
    plan = random_plan(0, ranks=2, slots=3)
    assert workers(2).run(read_late, plan, True) == [(True, True)] * 2
    assert workers(2).run(read_late, plan, False)[1] == (False, True), "without votes"
    assert not leaked()


@grid(("end", "paths"), itertools.product(("killed", "raises"), ("direct", "host")), quick=0, day=1)
def test_a_rank_that_ends_ends_every_other_with_one_message(doomed, end, paths):
    """Killed, or with an error of its own while its process lives on: the others do not wait for ever."""
    group = doomed(4)
    outcomes = group.outcomes(end_in_a_step, random_plan(0, ranks=4, slots=3), TransferOptions(paths=paths), end)
    mapped = group.outcomes(count_mapped)
    assert outcomes[2] is None if end == "killed" else outcomes[2].error == "ValueError"
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != 2]
    assert [outcome.error for outcome in others] == ["TransferError"] * 3
    assert all("A process died, or took no part" in outcome.message for outcome in others)
    assert mapped == [0, 0, None if end == "killed" else 0, 0]
    assert not leaked()


def end_in_a_step(rank, plan, options, end):
    group = peers(timeout_s=GONE_S)
    homes, post = shards(plan, rank), group.post

    def failing(sends, receives, what):
        if rank == 2 and "gradients of step 0, micro-step 0, routed layer 1" in what:
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("out of memory, say")
        return post(sends, receives, what)

    with (
        closing(TransferEngine(dict(enumerate(homes)), options, group, consensus(GONE_S))) as engine,
        mock.patch.object(group, "post", failing),
    ):
        walk(engine, plan, rank)


def count_mapped(rank):
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/dev/shm/foreroute-")


def too_much():
    status = os.statvfs("/dev/shm")
    # no memory is behind it: all rows are the same one
    return torch.zeros(1).expand(4, status.f_blocks * status.f_frsize // 8)


CANNOT_BEGIN = {
    r"rank 0: cannot take .* in /dev/shm: No space left on device .*paths='direct'": lambda rank: {
        "homes": [{"down_proj": too_much()}]
    },
    "in /nowhere/at/all: No such file or directory": lambda rank: {
        "options": TransferOptions(paths="host", shared_memory=Path("/nowhere/at/all"))
    },
    r"rank 1: 1 layers, \[\('down_proj', \(5, 2\), 'torch.float32'\)\]": lambda rank: {
        "homes": [{"down_proj": torch.zeros(4 + rank, 2)}]
    },
    # options decide which message is sent when: ranks that differ would take one for another
    r"of different options: rank 0: TransferOptions\(": lambda rank: {
        "options": TransferOptions(paths="host", prefetch=1 + rank)
    },
}
"""Words of the error, and what an engine is made of."""


def begun(rank, plan, words):
    with closing(make_engine(plan, rank, **CANNOT_BEGIN[words](rank))) as engine:
        begin(engine, 0, plan)


@pytest.mark.parametrize("words", CANNOT_BEGIN)
def test_what_cannot_begin_on_any_rank_is_refused_on_all_with_one_message(workers, words):
    outcomes = workers(2).outcomes(begun, random_plan(0, ranks=2), words)
    [(error, message)] = {(each.error, each.message) for each in outcomes}
    assert error == "TransferError"
    assert re.search(words, message)
    assert not leaked()


def test_memory_of_another_machine_or_that_cannot_be_mapped_is_refused_and_not_made_up(tmp_path):
    (tmp_path / "foreroute-folder").mkdir()
    for name, said in (
        ("foreroute-elsewhere", "different machines"),
        ("foreroute-folder", f"cannot map {tmp_path}/foreroute-folder: "),
    ):
        with pytest.raises(TransferError, match=re.escape(said)):
            open_shared(str(tmp_path / name), 64)
    assert [each.name for each in tmp_path.iterdir()] == ["foreroute-folder"]
