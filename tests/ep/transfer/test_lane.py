"""The thread of a rank's transfers: one for the life of its engine."""

import gc
import threading

import pytest

from foreroute.ep.transfer.engine import TransferOptions
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import make_engine, run_step


def transfer_threads():
    return {thread for thread in threading.enumerate() if thread.name == "transfers"}


def threads_of_a_run(rank, plan, options, closes):
    """How many are new after each step, whether they are the same, and how many when the engine is gone."""
    before = transfer_threads()
    engine, homes = make_engine(plan, rank, options)
    seen = []
    for step in range(3):
        run_step(engine, plan, homes, rank, step=step)
        seen.append(transfer_threads() - before)
    if closes:
        engine.close()
    del engine
    gc.collect()
    for thread in seen[0]:
        thread.join(20)
    return [len(each) for each in seen], seen[0] == seen[1] == seen[2], len(transfer_threads() - before)


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_an_engine_has_one_thread_for_its_life(workers, closes):
    for options in (TransferOptions(paths="direct", prefetch=2), TransferOptions(paths="host")):
        found = workers(2).run(threads_of_a_run, random_plan(0, ranks=2, slots=3), options, closes)
        assert found == [([1, 1, 1], True, 0)] * 2
