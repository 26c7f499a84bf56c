"""Runs on several ranks: they resume, on as many or others; what goes wrong on one ends all with one message."""

import errno
import os
import signal
from contextlib import closing, nullcontext
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from foreroute.capture import load_generation
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.errors import ConfigError, DivergedError
from foreroute.files import container
from foreroute.testing.ranks import Workers
from foreroute.train import RunFolder, train
from foreroute.train.folder import load_checkpoint
from foreroute.train.loop import Trainer
from tests.train.expert_parallel_steps import (
    ONE_LAYER,
    Steps,
    config_of,
    path_of,
    precise_trainer,
    run,
    run_config,
    step_on,
    steps_alone,
)
from tests.train.small_runs import records, same_state, tensors_of

pytestmark = pytest.mark.slow

CHAIN = [2, 1, 2]
"""Ranks of each step."""
ALONE = config_of(1, model=ONE_LAYER)
"""One process, on which the chain is done too."""
OTHER_ORDERS = 1000
"""How much further apart than two orders of summation in one process a change of ranks may be."""


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


@pytest.fixture(scope="module")
def uninterrupted(workers, tmp_path_factory):
    """One step on each number of ranks, each from the checkpoint of the one before; and one process that does all."""
    folder = tmp_path_factory.mktemp("chain")
    with precise_trainer(ALONE) as trainer:
        RunFolder(folder).save_checkpoint(trainer.state(), data="", keep=9)
    parts = [one_step(workers, num_ranks, folder, step) for step, num_ranks in enumerate(CHAIN)]
    generations = [part.generations[0] for part in parts]
    chain = Steps([part.records[0] for part in parts], generations, parts[-1].state)
    return folder, chain, steps_alone(ALONE, generations)


def one_step(workers, num_ranks, folder, step):
    if num_ranks == 1:
        return step_on(0, ALONE, folder, step)
    moving = config_of(num_ranks, model=ONE_LAYER, plan={"home_moves": 4})
    part, *_ = workers(num_ranks).run(step_on, moving, folder, step)
    assert part.records[0]["execution"]["home_moves"] > 0
    return part


def test_a_change_of_ranks_is_another_order_of_summation_and_no_more(uninterrupted):
    _, chain, alone = uninterrupted
    assert [record.get("execution", {}).get("ranks", 1) for record in chain.records] == CHAIN
    assert all(record["grad_norm"] > 0 for record in alone.records)
    tolerance = tolerance_of(alone)
    assert 0 < tolerance < 1e-7
    assert distance(chain, alone) <= tolerance
    assert {values["step"].item() for values in chain.state["optimizer"]["state"].values()} == {len(CHAIN)}


def test_optimizer_state_of_the_wrong_expert_is_seen(uninterrupted, workers, tmp_path):
    """A control: the first moments of experts are taken up one expert too late."""
    folder, chain, alone = uninterrupted
    last = len(CHAIN) - 1
    state = checkpoint(folder, last)
    for values in state["optimizer"]["state"].values():
        if values["exp_avg"].dim() == 3:
            values["exp_avg"] = values["exp_avg"].roll(1, 0)
    RunFolder(tmp_path).save_checkpoint(state, data="", keep=1)
    wrong = one_step(workers, CHAIN[last], tmp_path, last)
    assert wrong.generations[0].trace.equals(chain.generations[last].trace)
    wrong = Steps([*chain.records[:last], *wrong.records], chain.generations, wrong.state)
    assert distance(wrong, alone) > 1000 * tolerance_of(alone)


def tolerance_of(alone):
    """From one process that cuts the same rollouts into other micro-steps, and so adds in another order."""
    config = ALONE.model_copy(update={"rl": ALONE.rl.model_copy(update={"micro_step_tokens": 4096})})
    return OTHER_ORDERS * distance(steps_alone(config, alone.generations), alone)


def distance(steps, others):
    """The largest difference of losses, gradient norms, weights and optimizer state, over the largest value there."""
    pairs = [
        (torch.tensor([ours[key], truth[key]]).double())
        for ours, truth in zip(steps.records, others.records, strict=True)
        for key in ("loss", "grad_norm", "entropy")
    ]
    apart = [abs(ours - truth).item() / max(abs(truth).item(), 1e-3) for ours, truth in pairs]
    states = zip(*(tensors_of([each.state["model"], each.state["optimizer"]]) for each in (steps, others)), strict=True)
    return max(*apart, *(((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item() for a, b in states))


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


def test_what_goes_wrong_on_one_rank_ends_all_and_the_run_goes_on_later(workers, tmp_path):
    folder, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    (memory / "something").write_text("")
    config = run_config(2, rl={"steps": 2}, checkpoint={"every": 1}, parallel={"shared_memory": str(memory)})
    workers(2).run(run, run_config(2, rl={"steps": 1}, checkpoint={"every": 1}), folder)
    for way, errors, message in [
        ("bug", ("RankError", "KeyError"), "no such thing"),
        ("no numbers", ("DivergedError", "DivergedError"), "logits are not finite"),
        ("full disk", ("RunFolderError", "RankError"), "step-000002.safetensors cannot be written"),
    ]:
        outcomes = workers(2).outcomes(resume_broken, config, folder, way)
        assert tuple(outcome.error for outcome in outcomes) == errors, outcomes[0].trace
        assert all(message in outcome.message for outcome in outcomes)
        assert "\n" not in outcomes[0].message
        assert load_checkpoint(path_of(folder, 1))["step"] == 1
        assert [path.name for path in memory.iterdir()] == ["something"]
    assert workers(2).run(run, config, folder, True) == [1, 0]
    assert [record["step"] for record in records(folder)] == [0, 1]


def test_ranks_that_were_started_unlike_say_so(workers, tmp_path):
    config = run_config(2, rl={"steps": 1})
    outcomes = workers(2).outcomes(run_unlike, config, tmp_path / "run")
    assert [outcome.error for outcome in outcomes] == ["ConfigError"] * 2
    assert all("rank 1: rl.learning_rate is 1.0, 0.0006 on rank 0" in outcome.message for outcome in outcomes)
    assert not (tmp_path / "run").exists()


def die_in_update(rank, config, folder):
    """Rank 1 is killed in the second step, in the middle of its backward pass."""
    update = Trainer.update

    def die_behind(module, inputs, output):
        output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))

    def dying(trainer, *given, **options):
        if rank == 1 and trainer.step == 1:
            trainer.policy.model.model.layers[1].input_layernorm.register_forward_hook(die_behind)
        return update(trainer, *given, **options)

    with mock.patch.object(Trainer, "update", dying):
        run(rank, config, folder)


def test_a_killed_rank_ends_the_other_and_leaves_a_checkpoint(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    before = set(os.listdir("/dev/shm"))
    config = run_config(2, checkpoint={"every": 1}, parallel={"shared_memory": str(memory), "timeout_s": 60.0})
    with closing(Workers(2, timeout_s=60)) as group:
        survivor, dead = group.outcomes(die_in_update, config, tmp_path / "run")
    assert dead is None
    assert survivor.error == "TransferError", survivor.trace
    assert "A process died" in survivor.message
    assert load_checkpoint(path_of(tmp_path / "run", 1))["step"] == 1
    assert not list(memory.iterdir())
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "foreroute" in name]
