"""The thread of a rank's transfers: one, in order, and another only where one is stuck."""

import threading

import torch

from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.slots import TransferLane
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import make_engine, run_step

SOON_S = 20


def test_what_is_behind_a_job_that_was_left_does_not_wait_for_it():
    lane, stuck, done = TransferLane(torch.device("cpu")), threading.Event(), []
    ends = {name: threading.Event() for name in "abc"}

    def job(name, until=None):
        if until:
            until.wait(SOON_S)
        done.append((name, threading.current_thread()))
        ends[name].set()

    lane.submit(lambda: job("a", until=stuck))
    lane.submit(lambda: job("b"))
    assert not ends["b"].wait(0.1)
    lane.leave()
    assert ends["b"].wait(SOON_S)
    stuck.set()
    assert ends["a"].wait(SOON_S)
    lane.submit(lambda: job("c"))
    assert ends["c"].wait(SOON_S)
    assert [name for name, _ in done] == ["b", "a", "c"]
    threads = dict(done)
    assert threads["b"] is threads["c"] is not threads["a"]
    lane.close(SOON_S)
    assert not any(thread.is_alive() for thread in threads.values())


def threads_of_a_run(rank, plan, options):
    """After each step, and when the engine is closed."""
    engine, homes = make_engine(plan, rank, options)
    seen = []
    for step in range(3):
        run_step(engine, plan, homes, rank, step=step)
        seen.append([thread.ident for thread in threading.enumerate() if thread.name == "transfers"])
    engine.close()
    return seen, [thread for thread in threading.enumerate() if thread.name == "transfers"]


def test_an_engine_has_one_thread_for_its_life(workers):
    for options in (TransferOptions(paths="direct", prefetch=2), TransferOptions(paths="host", checksums=True)):
        for seen, left in workers(2).run(threads_of_a_run, random_plan(0, ranks=2, slots=3), options):
            assert len(set(map(tuple, seen))) == len(seen[0]) == 1
            assert not left
