"""What goes wrong between ranks: a step gets slower, or all of them end with one message. Never wrong, never hung."""

import errno
import os
import signal
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import DivergedError, EngineError
from foreroute.files import container
from foreroute.plan import Topology
from foreroute.planner import PlanInProgress
from foreroute.testing.ranks import Workers
from foreroute.train import experts, load_checkpoint
from foreroute.train.loop import Trainer
from tests.ep.transfer.faults import Fault, FaultyPeers, late_nowhere_else
from tests.train.expert_parallel_runs import path_of, resume, run, run_config
from tests.train.expert_parallel_steps import Steps, config_of, precise_trainer, steps_of
from tests.train.small_runs import records
from tests.train.test_expert_parallel import learned_alike


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


DEADLINE_S = 1.0


def test_late_and_damaged_replicas_leave_the_losses_as_they_are(workers, tmp_path):
    """A step with a damaged payload, one with a late transfer, and one without a fault."""
    what = "replicas of step 1, micro-step 0, routed layer 0"
    late = Fault("slow receiver", 1, what, given_up=tmp_path / "given-up")
    faults = [Fault("corrupt", 1, "replicas of step 0"), late, None]
    config = config_of(2, paths="direct", prefetch=0, slots="shared", checksums=True, deadline_s=DEADLINE_S)
    (steps, _), (_, happened) = workers(2).run(faulty_steps, config, faults)
    assert happened == [1, 1, 0]
    learned_alike(steps, config)
    damaged, delayed, undisturbed = (record["execution"] for record in steps.records)
    assert "arrived damaged" in " ".join(because(damaged).values())
    assert "had not arrived after 1.0 s" in because(delayed)["recompute", 0, 0]
    assert delayed["exposed_transfer_s"] >= DEADLINE_S
    for figures in (damaged, delayed, undisturbed):
        for name, m, layer in because(figures):
            stage = figures["stages"][name]
            assert stage["executed_MLG"][m][layer] == stage["at_home_MLG"][m][layer]
        as_planned = figures["max_over_mean"]["executed"] == figures["max_over_mean"]["planned"]
        assert as_planned == (not because(figures))


def because(figures):
    return {
        (name, *map(int, cell.split("."))): why
        for name, stage in figures["stages"].items()
        for cell, why in stage["fell_back"].items()
    }


def test_a_damaged_payload_that_nobody_verifies_is_seen_in_the_losses(workers):
    """A control: the fault is a fault."""
    faults = [Fault("corrupt", 1, "replicas of step 0")]
    config = config_of(2, paths="direct", prefetch=0, slots="shared")
    (steps, _), (_, happened) = workers(2).run(faulty_steps, config, faults)
    assert happened == [1]
    with pytest.raises(AssertionError):
        learned_alike(steps, config)


def test_what_goes_wrong_on_one_rank_ends_all_and_the_run_goes_on_later(workers, tmp_path):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    (memory / "something").write_text("")
    config = run_config(2, rl={"steps": 2}, checkpoint={"every": 1}, parallel={"shared_memory": str(memory)})
    workers(2).run(run, run_config(2, rl={"steps": 1}, checkpoint={"every": 1}), folder)
    for way, kinds, message in [
        ("full memory", ("TransferError",) * 2, f"of shared memory in {memory}: No space left on device"),
        ("plan of four", ("PlanError",) * 2, "the plan is for 4 ranks, and 2 are here; plan again for this world size"),
        ("no plan", ("MemoryError", "PlanError"), "no"),
        ("no later micro-step", ("MemoryError", "PlanError"), "no"),
        ("engine gone on rank 1", ("RankError", "EngineError"), "the engine is gone"),
        ("bug on rank 1", ("RankError", "KeyError"), "no such thing"),
        ("full disk", ("RunFolderError", "RankError"), "step-000002.safetensors cannot be written"),
    ]:
        outcomes = workers(2).outcomes(resume_broken, config, folder, way)
        assert tuple(outcome.kind for outcome in outcomes) == kinds, outcomes[0].trace
        assert all(message in outcome.message for outcome in outcomes)
        assert "\n" not in outcomes[0].message
        assert load_checkpoint(path_of(folder, 1))["step"] == 1
        assert [path.name for path in memory.iterdir()] == ["something"]
    assert workers(2).run(resume, config, folder) == [1, 0]
    assert [record["step"] for record in records(folder)] == [0, 1]


def test_ranks_end_together(workers, tmp_path):
    """When numbers of one of them are not finite."""
    config = run_config(2, rl={"steps": 3, "routing": "none"}, checkpoint={"every": 1})
    outcomes = workers(2).outcomes(diverge_once, config, tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["DivergedError"] * 2, outcomes[0].trace
    assert "the rollout of step 2 failed on another rank: rank 1: logits are not finite" in outcomes[0].message
    assert load_checkpoint(path_of(tmp_path / "run", 2))["step"] == 2


def test_ranks_that_were_started_unlike_say_so(workers, tmp_path):
    config = run_config(2, rl={"steps": 1})
    outcomes = workers(2).outcomes(run_unlike, config, tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["ConfigError"] * 2
    assert all("rank 1: rl.learning_rate is 1.0, 0.0006 on rank 0" in outcome.message for outcome in outcomes)
    assert not (tmp_path / "run").exists()
    here, there = tmp_path / "here", tmp_path / "there"
    workers(2).run(run, config, here)
    outcomes = workers(2).outcomes(resume_apart, config, here, there)
    assert [outcome.kind for outcome in outcomes] == ["ConfigError"] * 2
    assert all(
        "rank 1: the last checkpoint is None, 'step-000001.safetensors' on rank 0" in o.message for o in outcomes
    )
    assert not there.exists()
    taken = workers(2).outcomes(run, config, here)
    assert [outcome.kind for outcome in taken] == ["RunFolderError", "RankError"]
    assert {o.kind for o in workers(2).outcomes(run, run_config(4), tmp_path / "four")} == {"ConfigError"}
    odd = run_config(2, model={"sizes": {**config.model.sizes, "num_experts": 15}})
    uneven = workers(2).outcomes(run, odd, tmp_path / "odd")
    assert all("15 experts cannot be dealt to parallel.expert = 2 evenly" in outcome.message for outcome in uneven)


@pytest.mark.parametrize(
    ("dying", "survivor"), [(die_in_update, 0), pytest.param(die_planning, 1, marks=pytest.mark.slow)]
)
def test_a_killed_rank_ends_the_others_and_leaves_a_checkpoint(dying, survivor, tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    before = set(os.listdir("/dev/shm"))
    config = run_config(2, checkpoint={"every": 1}, parallel={"shared_memory": str(memory), "timeout_s": 60.0})
    group = Workers(2, timeout_s=60)
    try:
        outcomes = group.outcomes(dying, config, tmp_path / "run")
    finally:
        group.close()
    assert outcomes[1 - survivor] is None
    assert outcomes[survivor].kind == "TransferError", outcomes[survivor].trace
    assert "A process died" in outcomes[survivor].message
    assert load_checkpoint(path_of(tmp_path / "run", 1))["step"] == 1
    assert not list(memory.iterdir())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "foreroute" in name]
