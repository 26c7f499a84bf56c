"""Runs on several ranks: they resume, on as many ranks or others; what goes wrong on one ends all of them with one
message. Never wrong, never hung.
"""

import errno
import os
import signal
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from foreroute.capture import load_generation
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import ConfigError, DivergedError
from foreroute.files import container
from foreroute.testing.ranks import Workers
from foreroute.train import train
from foreroute.train.folder import load_checkpoint
from foreroute.train.loop import Trainer
from tests.train.expert_parallel_steps import path_of, run, run_config
from tests.train.small_runs import records, same_state

pytestmark = pytest.mark.slow


def test_an_interrupted_run_on_two_ranks_ends_as_the_uninterrupted_one(workers, tmp_path):
    """With homes that move from where they are."""
    config = run_config(2, parallel={"plan": {"home_moves": 4}})
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert workers(2).run(run, config, whole) == [2, 0]
    # rank 0 alone is asked to stop, and rank 1 stops with it
    assert workers(2).run(run, config, stopped, False, 1) == [1, 0]
    assert workers(2).run(run, config, stopped, True) == [1, 0]
    assert learned(stopped) == learned(whole)
    assert same_state(checkpoint(stopped, 2), checkpoint(whole, 2))
    assert all(record["execution"]["home_moves"] for record in records(whole)), "the case must move experts"
    trace = load_generation(whole / "rollouts" / "step-000000.safetensors").trace
    assert len(trace) == 8 * 4, "the trace holds the rollouts of all ranks"
    assert trace.tokens(0)[:3].tolist() != trace.tokens(16)[:3].tolist(), "whose prompts are others"
    written = AutoModelForCausalLM.from_pretrained(
        stopped / "model", dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).state_dict()
    assert same_state(dict(written), checkpoint(stopped, 2)["model"]), "the model is whole"
    # and with one process instead of two
    train(run_config(1, rl={"steps": 3}), whole, resume=True)
    assert [record.get("execution", {}).get("ranks", 1) for record in records(whole)] == [2, 2, 1]


def test_one_process_is_not_two(tmp_path):
    with pytest.raises(ConfigError):
        train(run_config(2), tmp_path / "run")


def checkpoint(folder, step):
    return load_checkpoint(path_of(folder, step))


def learned(folder):
    """Records without the seconds and paths in them."""
    timed = ("moving_homes_s", "exposed_transfer_s", "planning_s", "exposed_planning_s")
    found = records(folder)
    for record in found:
        for key in timed:
            del record["execution"][key]
        # which path they took follows from links that each run measures
        moved = record["execution"]["bytes"]
        moved["weights"] = moved.pop("host") + moved.pop("direct")
    return found


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
    rl = config.rl.model_copy(update={"learning_rate": 1.0 if rank == 1 else config.rl.learning_rate})
    run(rank, config.model_copy(update={"rl": rl}), folder)


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


def test_ranks_that_were_started_unlike_say_so(workers, tmp_path):
    config = run_config(2, rl={"steps": 1})
    outcomes = workers(2).outcomes(run_unlike, config, tmp_path / "run")
    assert [outcome.kind for outcome in outcomes] == ["ConfigError"] * 2
    assert all("rank 1: rl.learning_rate is 1.0, 0.0006 on rank 0" in outcome.message for outcome in outcomes)
    assert not (tmp_path / "run").exists()


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
