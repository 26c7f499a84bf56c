"""Runs on several ranks in which something goes wrong on one of them, as worker processes do them."""

import errno
import os
import signal
from contextlib import contextmanager
from unittest import mock

import numpy as np

from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import DivergedError, EngineError
from foreroute.files import container
from foreroute.plan import Topology
from foreroute.planner import PlanInProgress
from foreroute.train import experts
from foreroute.train.loop import Trainer
from tests.ep.transfer.faults import FaultyPeers, late_nowhere_else
from tests.train.expert_parallel_runs import run
from tests.train.expert_parallel_steps import Steps, precise_trainer, steps_of


def faulty_steps(rank, config, faults):
    """A step under each fault. Returns them as one, and how often each fault happened here."""
    with mock.patch.object(experts, "PeerGroup", FaultyPeers), precise_trainer(config) as trainer:
        peers, parts, happened = trainer.execution._engine._peers, [], []
        for fault in faults:
            peers.fault, peers.happened = fault, 0
            with late_nowhere_else(fault):
                parts.append(steps_of(trainer, 1))
            happened.append(peers.happened)
        records, generations = zip(*[(part.records[0], part.generations[0]) for part in parts], strict=True)
        return Steps(list(records), list(generations), parts[-1].state), happened


def resume_broken(rank, config, folder, way):
    with BREAKAGES[way](rank):
        run(rank, config, folder, resume=True)


def diverge_once(rank, config, folder):
    """What rank 1 samples for step 2 is no number, the first time. Returns the steps that are recorded here."""
    generate, calls = EmbeddedEngine.generate, []

    def once(*args):
        calls.append(1)
        if rank == 1 and len(calls) == 3:
            raise DivergedError("logits are not finite")
        return generate(*args)

    with mock.patch.object(EmbeddedEngine, "generate", once):
        return run(rank, config, folder)


def run_unlike(rank, config, folder):
    """Rank 1 was started with another configuration."""
    other = replace_rl(config, learning_rate=1.0)
    run(rank, other if rank == 1 else config, folder)


def resume_apart(rank, config, folder, elsewhere):
    """Rank 1 sees another folder at the same path, as without a shared file system."""
    run(rank, config, elsewhere if rank == 1 else folder, resume=True)


def replace_rl(config, **changes):
    return config.model_copy(update={"rl": config.rl.model_copy(update=changes)})


def _raising(error):
    def fail(*_, **__):
        raise error

    return fail


@contextmanager
def _engine_gone(rank):
    with mock.patch.object(EmbeddedEngine, "generate", _raising(EngineError("the engine is gone"))):
        yield


@contextmanager
def _bug(rank):
    with mock.patch.object(EmbeddedEngine, "generate", _raising(KeyError("no such thing"))):
        yield


@contextmanager
def _full_memory(rank):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", _raising(full)):
        yield


@contextmanager
def _full_disk(rank):
    write = container.write_atomically

    def without_room(target, *rest, **options):
        if target.parent.name == "checkpoints":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(target, *rest, **options)

    with mock.patch.object(container, "write_atomically", without_room):
        yield


def _only(there, breakage):
    @contextmanager
    def on_that_rank(rank):
        if rank != there:
            yield
            return
        with breakage(rank):
            yield

    return on_that_rank


@contextmanager
def _plan_of_four(rank):
    start = experts.planner.start

    def plan_for_four(counts_MLGE, topology, options, *, home_LE, costs):
        four = Topology(4, 4, topology.redundant_slots, topology.links)
        homes_of_four_LE = np.tile(four.contiguous_home_E(home_LE.shape[1]), (len(home_LE), 1))
        return start(np.tile(counts_MLGE, (1, 1, 2, 1)), four, options, home_LE=homes_of_four_LE, costs=costs)

    with mock.patch.object(experts.planner, "start", plan_for_four):
        yield


@contextmanager
def _no_plan(rank):
    with mock.patch.object(experts.planner, "start", _raising(MemoryError("no room to plan"))):
        yield


@contextmanager
def _no_later_micro_step(rank):
    add = PlanInProgress.add

    def failing(self, hosts, figures_ML2, begin, layer):
        if begin:
            raise MemoryError("no room to plan")
        add(self, hosts, figures_ML2, begin, layer)

    with mock.patch.object(PlanInProgress, "add", failing):
        yield


BREAKAGES = {
    "engine gone on rank 1": _only(1, _engine_gone),
    "bug on rank 1": _only(1, _bug),
    "full memory": _only(0, _full_memory),
    "full disk": _only(0, _full_disk),
    "plan of four": _plan_of_four,
    "no plan": _no_plan,
    "no later micro-step": _no_later_micro_step,
}


def die_planning(rank, config, folder):
    """The rank that plans is killed while it plans the second step; the other has nothing to plan."""
    start, steps = experts.planner.start, []

    def dying(*given, **options):
        steps.append(1)
        if len(steps) > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(*given, **options)

    with mock.patch.object(experts.planner, "start", dying):
        run(rank, config, folder)


def die_in_update(rank, config, folder):
    """Rank 1 is killed in the second step, in the middle of its backward pass."""
    update = Trainer.update

    def dying(trainer, *given, **options):
        if rank == 1 and trainer.step == 1:
            parameter = next(trainer.policy.model.parameters())
            parameter.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return update(trainer, *given, **options)

    with mock.patch.object(Trainer, "update", dying):
        run(rank, config, folder)
