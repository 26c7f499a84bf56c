"""Runs on several ranks: that they resume, on as many ranks or others, and end together."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from foreroute.capture import load_generation
from foreroute.errors import ConfigError
from foreroute.train import RunFolder, parse_config, train
from foreroute.train.folder import load_checkpoint
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
from tests.train.tiny_model import write_model, write_tokenizer

pytestmark = pytest.mark.slow

CHAIN = (2, 1, 2)
"""Ranks of each step."""
ALONE = config_of(1, model=ONE_LAYER)
"""One process, on which chains are done too."""
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
    written = AutoModelForCausalLM.from_pretrained(
        stopped / "model", dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).state_dict()
    assert same_state(dict(written), checkpoint(stopped, 2)["model"]), "the model is whole"
    # and with one process instead of two
    train(run_config(1, rl={"steps": 3}), whole, resume=True)
    assert [record.get("execution", {}).get("ranks", 1) for record in records(whole)] == [2, 2, 1]


@pytest.fixture(scope="module")
def uninterrupted(workers, tmp_path_factory):
    """One step on each number of ranks, each from the checkpoint of the one before; and one process that does all.

    Experts move before every step on ranks.
    """
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
    assert [record.get("execution", {}).get("ranks", 1) for record in chain.records] == list(CHAIN)
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


def test_a_run_begins_with_the_weights_of_a_folder_or_of_a_checkpoint(workers, tmp_path):
    write_model(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "3+4="}\n')
    (tmp_path / "mine.py").write_text("def reward(*given):\n    return [len(each) % 3 for each in given[1]]\n")
    values = {
        "name": "of-a-folder",
        "model": {"path": str(tmp_path / "model"), "gradient_checkpointing": True},
        "task": {"data": str(tmp_path / "data.jsonl"), "reward": f"{tmp_path / 'mine.py'}:reward"},
        "rollout": {"prompts": 4, "group_size": 4},
        "rl": {"steps": 1, "micro_step_tokens": 1024},
        "parallel": {"expert": 2},
    }
    values["task"] |= {"max_prompt_tokens": 8, "max_response_tokens": 6}
    workers(2).run(run, parse_config(values, source="test"), tmp_path / "first")
    there = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).state_dict()
    assert same_state(checkpoint(tmp_path / "first", 0)["model"], dict(there))
    values["warm_start"] = {"checkpoint": str(path_of(tmp_path / "first", 1))}
    workers(2).run(run, parse_config(values, source="test"), tmp_path / "second")
    begun, learned = checkpoint(tmp_path / "second", 0)["model"], checkpoint(tmp_path / "first", 1)["model"]
    assert same_state(begun, learned)
    assert not same_state(learned, dict(there))


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
