"""The thread of a rank's transfers: one for the life of its engine."""

import threading

from foreroute.ep.transfer.engine import TransferOptions
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import make_engine, run_step


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
    for options in (TransferOptions(paths="direct", prefetch=2), TransferOptions(paths="host")):
        for seen, left in workers(2).run(threads_of_a_run, random_plan(0, ranks=2, slots=3), options):
            assert len(set(map(tuple, seen))) == len(seen[0]) == 1
            assert not left
