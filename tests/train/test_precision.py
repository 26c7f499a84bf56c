"""bfloat16 with weights in float32 behind it, and activations that are computed again."""

import io

import pytest
import torch

from foreroute.errors import ConfigError
from foreroute.train import Watcher, load_checkpoint, train
from foreroute.train.config import ModelConfig
from foreroute.train.model import in_dtype
from foreroute.train.optimizer import MasterAdamW, make_optimizer
from tests.train.expert_parallel_steps import scored_by_tokens
from tests.train.small_runs import records, same_state, small_config, trainer_of

BEGUN = torch.tensor([1.0, -2.0, 0.5]).bfloat16()
RATE = 1e-4


def weights(dtype=torch.bfloat16):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(BEGUN.to(dtype, copy=True))
    return model


def stepped(model, optimizer, steps):
    for step in steps:
        model.weight.grad = (0.5 + torch.rand(3, generator=torch.Generator().manual_seed(step))).to(model.weight.dtype)
        optimizer.step()
    return model.weight.detach().clone()


def test_steps_below_the_resolution_of_bfloat16_add_up():
    kept, alone, oracle = weights(), weights(), weights(torch.float32)
    optimizer = make_optimizer(kept, lr=RATE)
    for step in range(100):
        gradient = 0.5 + torch.rand(3, generator=torch.Generator().manual_seed(step))
        kept.weight.grad, oracle.weight.grad = gradient.bfloat16(), gradient.bfloat16().float()
        optimizer.step()
        if not step:
            in_float32 = make_optimizer(oracle, lr=RATE)
            assert type(in_float32) is torch.optim.AdamW
        in_float32.step()
    assert torch.equal(optimizer.state[kept.weight]["master"], oracle.weight)
    assert torch.equal(kept.weight, oracle.weight.bfloat16())
    assert not torch.equal(kept.weight, BEGUN)
    # a control: no single step gets anywhere without float32 behind it
    assert torch.equal(stepped(alone, torch.optim.AdamW([alone.weight], lr=RATE), range(100))[:2], BEGUN[:2])


def test_float32_state_is_saved_and_taken_up_without_rounding():
    whole, halved, wrong = weights(), weights(), weights()
    expected = make_optimizer(whole, lr=RATE)
    stepped(whole, expected, range(60))
    first = make_optimizer(halved, lr=RATE)
    stepped(halved, first, range(30))
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    second = make_optimizer(halved, lr=RATE)
    second.load_state_dict(state)
    stepped(halved, second, range(30, 60))
    assert same_state(second.state_dict(), expected.state_dict())
    # a control: torch's own way rounds what it takes up
    rounded = MasterAdamW([wrong.weight], lr=RATE)
    torch.optim.AdamW.load_state_dict(rounded, state)
    assert rounded.state[wrong.weight]["master"].dtype == torch.bfloat16


def test_gradients_of_micro_steps_add_up_in_float32():
    model = in_dtype(torch.nn.Linear(1, 1, bias=False), ModelConfig(dtype="bfloat16"))
    for value in (1.0, 2**-10):
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.grad.dtype == torch.float32
    assert model.weight.grad.item() == 1 + 2**-10


def test_a_bfloat16_run_is_resumed_to_the_bit(tmp_path):
    few = {"prompts": 2, "group_size": 2}
    config = small_config(model={"dtype": "bfloat16"}, rl={"steps": 2}, warm_start={"max_steps": 2}, rollout=few)
    seen = []
    with scored_by_tokens():
        whole = train(config, tmp_path / "whole")
        train(config, tmp_path / "stopped", watcher=Watcher(on_step=seen.append, should_stop=lambda: len(seen) == 1))
        resumed = train(config, tmp_path / "stopped", resume=True)
    state = load_checkpoint(whole.last_checkpoint())
    assert records(resumed.path) == records(whole.path)
    assert same_state(load_checkpoint(resumed.last_checkpoint()), state)
    assert {weight.dtype for weight in state["model"].values()} == {torch.bfloat16}
    assert {values["master"].dtype for values in state["optimizer"]["state"].values()} == {torch.float32}


def one_step(checkpointing):
    """A record, the state after it, and how often the experts of the first layer ran."""
    config = small_config(model={"gradient_checkpointing": checkpointing}, rollout={"precision": "fp8"})
    trainer, runs = trainer_of(config), []
    experts = trainer.policy.model.get_submodule(trainer.policy.router_paths[0].removesuffix("gate") + "experts")
    experts.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    with scored_by_tokens():
        _, record = trainer.run_step()
    del record["seconds"]
    return record, trainer.state(), len(runs)


def test_activations_computed_again_change_no_bit():
    record, state, runs = one_step(checkpointing=False)
    assert record["grad_norm"] > 0
    assert record["mismatch"]["native"]["differing_share"] > 0, "routes of another kind would be seen"
    other_record, other_state, more_runs = one_step(checkpointing=True)
    assert more_runs > runs
    assert other_record == record
    assert same_state(other_state, state)


def test_several_processes_are_refused():
    with pytest.raises(ConfigError, match=r'model\.dtype = "bfloat16" trains in one process'):
        small_config(model={"dtype": "bfloat16"}, rollout={"prompts": 8}, parallel={"expert": 2})
