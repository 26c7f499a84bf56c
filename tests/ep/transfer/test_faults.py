"""What goes wrong between ranks: a step gets slower, or ends everywhere with one message. Never wrong, never hung."""

import gc
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.host_memory import open_shared
from foreroute.testing.ranks import Workers
from tests.ep.transfer.faults import Fault, FaultyPeers, late_nowhere_else
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import (
    WITHIN,
    all_experts,
    begin,
    largest_difference,
    make_engine,
    peers,
    reference,
    run_step,
    shards,
    summed,
)

MEMORY = Path("/dev/shm")
GONE_S = 3.0
"""After which a rank is taken for dead."""
GUARDED = TransferOptions(paths="direct", checksums=True, deadline_s=5.0)


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


def train(rank, plan, options, fault, *, spoil=None):
    """One recompute and one update under a fault, beside one process that has all experts."""
    group = peers(kind=FaultyPeers)
    group.fault, group.happened = fault, 0
    engine, homes = make_engine(plan, rank, options, kind=FaultyPeers)
    if spoil is not None:
        spoil(rank, engine)
    with late_nowhere_else(fault):
        with torch.no_grad():
            recompute = summed(run_step(engine, plan, homes, rank, updating=False))
        update = summed(run_step(engine, plan, homes, rank))
    everything = all_experts(plan)
    wanted = reference(plan, everything)
    group.fault = None
    engine.close()
    return {
        "loss": max(abs(recompute / wanted - 1), abs(update / wanted - 1)),
        "grad": largest_difference(plan, homes, rank, everything),
        "at_home": [(r.cell, r.at_home_because) for r in engine.take_records() if r.at_home_because],
        "happened": group.happened,
    }


def assert_right(outcomes, *, at_home):
    """The right numbers, and the same cells at home on all ranks."""
    assert max(outcome["loss"] for outcome in outcomes) < WITHIN
    assert max(outcome["grad"] for outcome in outcomes) < WITHIN
    assert all(outcome["at_home"] == outcomes[0]["at_home"] for outcome in outcomes)
    assert {cell[1:] for cell, _ in outcomes[0]["at_home"]} == at_home


def because(outcomes):
    return {reason for _, reason in outcomes[0]["at_home"]}


@pytest.mark.parametrize(
    ("kind", "prefetch", "slots"),
    [
        ("slow sender", 0, "layer"),
        ("slow sender", 1, "shared"),
        ("slow receiver", 0, "shared"),
        ("slow receiver", 1, "layer"),
    ],
)
def test_a_late_transfer_leaves_the_homes_in_force(workers, tmp_path, kind, prefetch, slots):
    options = replace(GUARDED, prefetch=prefetch, slots=slots, deadline_s=0.1)
    fault = Fault(kind, 1, "replicas of step 0, micro-step 1, routed layer 1", given_up=tmp_path / "given-up")
    outcomes = workers(4).run(train, random_plan(0, ranks=4, slots=3), options, fault)
    assert outcomes[1]["happened"] == 1
    assert_right(outcomes, at_home={(1, 1)})
    assert all("had not arrived after 0.1 s" in reason for reason in because(outcomes))


def test_a_corrupt_payload_leaves_the_homes_in_force(workers):
    fault = Fault("corrupt", 1, "replicas of step 0, micro-step 1, routed layer 2")
    outcomes = workers(4).run(train, random_plan(0, ranks=4, slots=3), GUARDED, fault)
    assert outcomes[1]["happened"] == 1
    assert_right(outcomes, at_home={(1, 2)})
    assert all("arrived damaged" in reason for reason in because(outcomes))


def test_without_checksums_a_corrupt_payload_is_seen_by_the_comparison_alone(workers):
    fault = Fault("corrupt", 1, "replicas of step 0, micro-step 1, routed layer 2")
    options = TransferOptions(paths="direct")
    outcomes = workers(4).run(train, random_plan(0, ranks=4, slots=3), options, fault)
    assert max(outcome["loss"] for outcome in outcomes) > 1e-4


def test_what_tokens_were_sent_to_is_sent_again(workers):
    """Later fetches of a cell that replicas serve cannot fall back any more."""
    fault = Fault("corrupt", 1, "replicas of step 0, micro-step 1, routed layer 1", times=2)
    plan = random_plan(0, ranks=4, slots=3)
    outcomes = workers(4).run(refetch_under, plan, replace(GUARDED, prefetch=0, slots="shared"), fault)
    assert outcomes[1]["happened"] == 2
    assert_right(outcomes, at_home=set())


def refetch_under(rank, plan, options, fault):
    """The fault begins after the first recompute."""
    group = peers(kind=FaultyPeers)
    group.fault, group.happened = None, 0
    engine, homes = make_engine(plan, rank, options, kind=FaultyPeers)
    with torch.no_grad():
        run_step(engine, plan, homes, rank, updating=False)
    group.fault = fault
    update = summed(run_step(engine, plan, homes, rank))
    group.fault = None
    everything = all_experts(plan)
    wanted = reference(plan, everything)
    engine.close()
    return {
        "loss": abs(update / wanted - 1),
        "grad": largest_difference(plan, homes, rank, everything),
        "at_home": [(r.cell, r.at_home_because) for r in engine.take_records() if r.at_home_because],
        "happened": group.happened,
    }


def test_a_corrupt_gradient_is_sent_again(workers):
    fault = Fault("corrupt", 1, "gradients of step 0, micro-step 1, routed layer 1", times=2)
    outcomes = workers(4).run(train, random_plan(0, ranks=4, slots=3), GUARDED, fault)
    assert outcomes[1]["happened"] == 2
    assert_right(outcomes, at_home=set())


def test_a_peer_that_sends_nothing_but_damage_ends_every_rank(workers):
    fault = Fault("corrupt", 1, "gradients of", times=10**6)
    outcomes = workers(4).outcomes(train, random_plan(0, ranks=4, slots=3), GUARDED, fault)
    assert {outcome.kind for outcome in outcomes} == {"TransferError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "failed 3 times: rank" in outcomes[0].message


def spoil_row(rank, engine):
    """Rank 1 writes over its published shard."""
    memory = engine._channels.memory
    for row in range(2 if rank == 1 else 0):
        memory.row(1, 1, "down_proj", row)[0, 0] += 1


def spoil_stamp(rank, engine):
    if rank == 1:
        engine._channels.memory._stamps_W2[1, 0] = 7


def test_damaged_host_memory_leaves_the_homes_in_force(workers):
    plan = random_plan(0, ranks=2, slots=3)
    options = TransferOptions(paths="host", checksums=True)
    outcomes = workers(2).run(train_spoilt, plan, options, "row")
    assert_right(outcomes, at_home={(m, 1) for m in range(2) if (plan.cell(m, 1).rank_R == 0).any()})
    assert all("rank 0: the replicas in slots" in reason for reason in because(outcomes))


def test_host_memory_of_another_version_leaves_the_homes_in_force(workers):
    plan = random_plan(0, ranks=2, slots=3)
    options = TransferOptions(paths="host", deadline_s=5)
    outcomes = workers(2).run(train_spoilt, plan, options, "stamp")
    cells = {(m, layer) for m in range(2) for layer in range(3) if (plan.cell(m, layer).rank_R == 0).any()}
    assert_right(outcomes, at_home=cells)
    assert because(outcomes) == {"rank 0: the shared memory of rank 1 holds version 7 of the weights, expected 1"}


def train_spoilt(rank, plan, options, what):
    return train(rank, plan, options, None, spoil={"row": spoil_row, "stamp": spoil_stamp}[what])


@pytest.mark.parametrize(
    ("kind", "paths", "votes"),
    [
        ("killed", "direct", True),
        *(
            pytest.param(*case, marks=marks)
            for marks, case in (
                (pytest.mark.slow, ("killed", "host", False)),
                (pytest.mark.slow, ("raises", "direct", False)),
                (pytest.mark.slow, ("raises", "host", True)),
                (pytest.mark.exhaustive, ("killed", "direct", False)),
                (pytest.mark.exhaustive, ("killed", "host", True)),
            )
        ),
    ],
)
def test_a_rank_that_ends_ends_every_other_with_one_message(kind, paths, votes):
    """Killed, or with an error of its own while its process lives on: the others do not wait for ever."""
    options = TransferOptions(paths=paths, checksums=votes, timeout_s=GONE_S)
    group = Workers(4, timeout_s=120)  # a fifth of what they would wait by default
    try:
        outcomes = group.outcomes(end_in_a_step, random_plan(0, ranks=4, slots=3), options, kind)
        mapped = group.outcomes(count_mapped)
    finally:
        group.close()
    assert outcomes[2] is None if kind == "killed" else outcomes[2].kind == "ValueError"
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != 2]
    assert [outcome.kind for outcome in others] == ["TransferError"] * 3
    assert all("A process died, or took no part" in outcome.message for outcome in others)
    assert mapped == [0, 0, None if kind == "killed" else 0, 0]
    assert not leaked()


def end_in_a_step(rank, plan, options, kind):
    group = peers(timeout_s=GONE_S, kind=FaultyPeers)
    homes = shards(plan, rank)
    with closing(TransferEngine(homes, plan.topology, options, group)) as engine:
        engine.publish()
        group.fault = Fault(kind, 2, "gradients of step 0, micro-step 0, routed layer 1")
        run_step(engine, plan, homes, rank)


def count_mapped(rank):
    """Pieces of shared memory that the process still has."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/dev/shm/foreroute-")


def test_a_full_shared_memory_directory_ends_every_rank_with_one_message(workers):
    outcomes = workers(2).outcomes(ask_for_too_much, random_plan(0, ranks=2))
    assert {outcome.kind for outcome in outcomes} == {"TransferError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    message = outcomes[0].message
    assert "rank 0: cannot take" in message
    assert "of shared memory in /dev/shm: No space left on device" in message
    assert "paths='direct'" in message
    assert not leaked()


def ask_for_too_much(rank, plan):
    status = os.statvfs(MEMORY)
    # no memory is behind it: all rows are the same one
    giant = torch.zeros(1).expand(4, status.f_blocks * status.f_frsize // 8)
    TransferEngine([{"down_proj": giant}], plan.topology, TransferOptions(paths="host"), peers())


def test_a_missing_shared_memory_directory_says_so(workers):
    outcomes = workers(2).outcomes(look_in, "/nowhere/at/all", random_plan(0, ranks=2))
    assert all("in /nowhere/at/all: No such file or directory" in outcome.message for outcome in outcomes)


def look_in(rank, directory, plan):
    TransferEngine(shards(plan, rank), plan.topology, TransferOptions(directory=Path(directory)), peers())


def test_files_of_the_dead_are_removed_and_those_of_the_living_kept(workers, tmp_path):
    from foreroute.ep.transfer.host_memory import create_file

    stale = tmp_path / f"foreroute-{os.getuid()}-1-dead"
    stale.write_bytes(b"x")
    theirs = tmp_path / f"foreroute-{os.getuid() + 1}-1-dead"
    theirs.write_bytes(b"x")
    alive = create_file(tmp_path, 64)
    assert workers(2).outcomes(look_in, str(tmp_path), random_plan(0, ranks=2)) == [None, None]
    assert sorted(tmp_path.iterdir()) == sorted([theirs, alive.path])
    alive.unname()
    assert list(tmp_path.iterdir()) == [theirs]


def test_memory_of_another_machine_is_refused_and_not_made_up(tmp_path):
    tensor, objection = open_shared(str(tmp_path / "foreroute-elsewhere"), 64)
    assert not len(tensor)
    assert "they are on different machines" in objection
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["ranks", "plan", "step"])
def test_another_plan_on_any_rank_is_refused_on_all(workers, wrong):
    outcomes = workers(2).outcomes(begin_with, random_plan(0, ranks=2), wrong)
    assert {outcome.kind for outcome in outcomes} == {"PlanError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    wanted = {
        "ranks": "the plan is for 4 ranks, and 2 are here; plan again for this world size",
        "plan": "ranks hold different plans (rank 0: step 0, 2 ranks, plan ",
        "step": "rank 1: step 1, 2 ranks",
    }
    assert wanted[wrong] in outcomes[0].message


def begin_with(rank, plan, wrong):
    engine, _ = make_engine(plan, rank)
    try:
        if wrong == "ranks":
            begin(engine, 0, random_plan(0, ranks=4), updating=True)
        elif wrong == "plan":
            begin(engine, 0, random_plan(rank, ranks=2), updating=True)
        else:
            begin(engine, rank, plan, updating=True)
    finally:
        engine.close()


def test_shards_of_different_shapes_are_refused_on_all_ranks(workers):
    outcomes = workers(2).outcomes(uneven, random_plan(0, ranks=2))
    assert {outcome.kind for outcome in outcomes} == {"TransferError"}
    assert all("rank 1 has 1 layers, [('down_proj', (5, 2), 'torch.float32')]" in o.message for o in outcomes)


def uneven(rank, plan):
    TransferEngine([{"down_proj": torch.zeros(4 + rank, 2)}], plan.topology, TransferOptions(), peers())


@pytest.mark.parametrize("differing", ["topology", "options"])
def test_engines_that_would_compute_other_messages_are_refused_on_all_ranks(workers, differing):
    """Bandwidths and options decide which message is sent when: ranks that differ would take one for another."""
    outcomes = workers(2).outcomes(make_another, random_plan(0, ranks=2), differing)
    assert {outcome.kind for outcome in outcomes} == {"TransferError"}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert "ranks make engines of different topologies or options: rank 0 has Topology(" in outcomes[0].message


def make_another(rank, plan, differing):
    options = TransferOptions(prefetch=1 + rank if differing == "options" else 1)
    links = replace(plan.topology.links, host_bytes_per_s=1e9 * (1 + rank))
    topology = replace(plan.topology, links=links) if differing == "topology" else plan.topology
    TransferEngine(shards(plan, rank), topology, options, peers())


def test_memory_that_cannot_be_mapped_is_refused_and_no_crash(tmp_path):
    (tmp_path / "foreroute-folder").mkdir()
    tensor, objection = open_shared(str(tmp_path / "foreroute-folder"), 64)
    assert not len(tensor)
    assert objection.startswith(f"cannot map {tmp_path}/foreroute-folder: ")


def test_nothing_is_mapped_after_close(workers):
    workers(2).run(close_and_look, random_plan(0, ranks=2))
    assert not leaked()


def close_and_look(rank, plan):
    before = count_mapped(rank)
    engine, _ = make_engine(plan, rank, TransferOptions(paths="host"))
    assert count_mapped(rank) == before + 1
    engine.close()
    del engine
    assert count_mapped(rank) == before


def test_the_faulty_path_without_a_fault_is_the_real_one(workers):
    outcomes = workers(4).run(train, random_plan(0, ranks=4, slots=3), GUARDED, None)
    assert_right(outcomes, at_home=set())
