"""What goes wrong between ranks: a step gets slower, or all of them end with one message. Never wrong, never hung."""

import errno
import os
import signal
from contextlib import nullcontext
from unittest import mock

import pytest

from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import DivergedError
from foreroute.files import container
from foreroute.testing.ranks import Workers
from foreroute.train.folder import load_checkpoint
from foreroute.train.loop import Trainer
from tests.train.expert_parallel_steps import path_of, run, run_config
from tests.train.small_runs import records


def resume_broken(rank, config, folder, way):
    write = container.write_atomically

    def without_room(target, *rest, **options):
        if target.parent.name == "checkpoints":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(target, *rest, **options)

    there, *replaced = {
        "bug": (1, EmbeddedEngine, "generate", mock.Mock(side_effect=KeyError("no such thing"))),
        "no numbers": (1, EmbeddedEngine, "generate", mock.Mock(side_effect=DivergedError("logits are not finite"))),
        "full disk": (0, container, "write_atomically", without_room),
    }[way]
    with mock.patch.object(*replaced) if rank == there else nullcontext():
        run(rank, config, folder, True)


def run_unlike(rank, config, folder):
    other = replace_rl(config, learning_rate=1.0)
    run(rank, other if rank == 1 else config, folder)


def replace_rl(config, **changes):
    return config.model_copy(update={"rl": config.rl.model_copy(update=changes)})


def die_behind(module, inputs, output):
    output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))


def die_in_update(rank, config, folder):
    """Rank 1 is killed in the second step, in the middle of its backward pass."""
    update = Trainer.update

    def dying(trainer, *given, **options):
        if rank == 1 and trainer.step == 1:
            trainer.policy.model.model.layers[1].input_layernorm.register_forward_hook(die_behind)
        return update(trainer, *given, **options)

    with mock.patch.object(Trainer, "update", dying):
        run(rank, config, folder)


@pytest.mark.slow
def test_what_goes_wrong_on_one_rank_ends_all_and_the_run_goes_on_later(workers, tmp_path):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    (memory / "something").write_text("")
    config = run_config(2, rl={"steps": 2}, checkpoint={"every": 1}, parallel={"shared_memory": str(memory)})
    workers(2).run(run, run_config(2, rl={"steps": 1}, checkpoint={"every": 1}), folder)
    for way, kinds, message in [
        ("bug", ("RankError", "KeyError"), "no such thing"),
        ("no numbers", ("DivergedError", "DivergedError"), "logits are not finite"),
        ("full disk", ("RunFolderError", "RankError"), "step-000002.safetensors cannot be written"),
    ]:
        outcomes = workers(2).outcomes(resume_broken, config, folder, way)
        assert tuple(outcome.kind for outcome in outcomes) == kinds, outcomes[0].trace
        assert all(message in outcome.message for outcome in outcomes)
        assert "\n" not in outcomes[0].message
        assert load_checkpoint(path_of(folder, 1))["step"] == 1
        assert [path.name for path in memory.iterdir()] == ["something"]
    assert workers(2).run(run, config, folder, True) == [1, 0]
    assert [record["step"] for record in records(folder)] == [0, 1]


@pytest.mark.slow
def test_ranks_that_were_started_unlike_say_so(workers, tmp_path):
    config = run_config(2, rl={"steps": 1})
    outcomes = workers(2).outcomes(run_unlike, config, tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["ConfigError"] * 2
    assert all("rank 1: rl.learning_rate is 1.0, 0.0006 on rank 0" in outcome.message for outcome in outcomes)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_killed_rank_ends_the_other_and_leaves_a_checkpoint(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    before = set(os.listdir("/dev/shm"))
    config = run_config(2, checkpoint={"every": 1}, parallel={"shared_memory": str(memory), "timeout_s": 60.0})
    group = Workers(2, timeout_s=60)
    try:
        outcomes = group.outcomes(die_in_update, config, tmp_path / "run")
    finally:
        group.close()
    survivor, dead = outcomes
    assert dead is None
    assert survivor.kind == "TransferError", survivor.trace
    assert "A process died" in survivor.message
    assert load_checkpoint(path_of(tmp_path / "run", 1))["step"] == 1
    assert not list(memory.iterdir())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "foreroute" in name]
