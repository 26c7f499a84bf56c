"""LoRA on experts that are spread over ranks: switched, merged, saved and refused as in one process.

That it trains as in one process is in `test_training`. Each test stands behind the function that worker processes run.
"""

from dataclasses import replace

import peft
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import AttachError
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import log_probs
from tests.ep import training_worker
from tests.ep.test_state_dict import WITHIN, home_LE
from tests.ep.training import Case, batch, by_expert, policy, replaying, train_alone, with_lora
from tests.ep.training_worker import all_rows
from tests.ep.transfer.plans import split_plan
from tests.tiers import grid

CASE = Case(ranks=2, plan=0, dtype=torch.float64, lora=True)
WAYS = ("on", "merged", "unmerged", "other", "off")


def switch(model, way):
    """Have adapters do so from here on."""
    {
        "on": lambda: None,
        "merged": model.merge_adapter,
        "unmerged": model.unmerge_adapter,
        "other": lambda: model.set_adapter("other"),
        "off": model.base_model.disable_adapter_layers,
    }[way]()


def with_two(case):
    """A policy with a second adapter, of another rank and scaling."""
    model = policy(case).eval()
    experts = model.peft_config["default"].target_parameters
    config = peft.LoraConfig(r=2, lora_alpha=3, target_parameters=experts, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model.add_adapter("other", config)
    return model.double()


@torch.no_grad()
def switched(rank, family):
    """Log-probs of this rank's batch under a plan, and of one process, whatever the adapters do."""
    case = replace(CASE, family=family)
    alone, model = with_two(case), with_two(case)
    routed, plainly = hf.attach(model), hf.attach(alone)
    placed = hf.distribute(model, home_LE=home_LE(family, 2), timeout_s=20)
    rows_M = all_rows(routed, case, rank, 0)[:1]
    counts_MLGE = routed.gather_counts(rows_M)
    plan, found = split_plan(3, counts_MLGE, placed.home_LE), {}
    for way in WAYS:
        for each in (model, alone):
            switch(each, way)
        with routed.execute(plan, counts_MLGE, rows_M), routed.replay(rows_M[0]):
            spread = log_probs(model, batch(rank, 0, 0))
        with replaying(plainly, case, rank, 0, 0):
            found[way] = spread, log_probs(alone, batch(rank, 0, 0))
    return found


@grid("family", ["qwen3_moe", "gpt_oss"], quick=1)
def test_adapters_are_merged_and_switched_off_as_in_one_process(workers, family):
    for found in workers(2).run(switched, family):
        for spread, alone in found.values():
            assert (spread - alone).abs().max() < WITHIN
        on, off, other = (found[way][0] for way in ("on", "off", "other"))
        assert (found["merged"][0] - on).abs().max() < WITHIN
        assert min((on - off).abs().max(), (on - other).abs().max()) > 1e-3, "the control: they do something"


def test_an_expert_that_nobody_picked_gets_exactly_no_gradient(workers):
    case = replace(CASE, routing="crowded", plan=4)
    for grads in (train_alone(case.alone)["grads"], workers(2).run(training_worker.train, case)[0]["grads"]):
        factors = {name: grad for name, grad in grads.items() if ".mlp.experts." in name}
        assert len(factors) == 2 * 2 * 3
        for name, grad in factors.items():
            is_used = by_expert(name, grad).flatten(1).any(1).tolist()
            assert is_used == [True] * 2 + [False] * 6, name


def written(rank, folder):
    """The whole state of a model of random homes that is written, and taken up by another."""
    model = with_lora(tiny("qwen3_moe", seed=1))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    placed = hf.distribute(model, home_LE=home_LE("qwen3_moe", 2), timeout_s=20)
    hf.save_pretrained(placed, folder)
    other = hf.distribute(with_lora(tiny("qwen3_moe", seed=5)), home_LE=home_LE("qwen3_moe", 3), timeout_s=20)
    other.load_state_dict(placed.state_dict())
    states = [each.state_dict() for each in (placed, other)]
    return all(
        state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
        for state in states
    )


def test_peft_loads_what_ranks_have_written_together(workers, tmp_path):
    folder = tmp_path / "adapters"
    assert workers(2).run(written, folder) == [True, True]
    loaded = peft.PeftModel.from_pretrained(tiny("qwen3_moe", seed=1), folder)
    expected = with_lora(tiny("qwen3_moe", seed=1)).state_dict()
    assert sum("lora_" in name for name in expected) == 3 * 6
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def loaded(rank, folder):
    """Of a model that ranks read their experts of: how far log-probs are off one process, what was drawn, and whether
    PEFT's own loading takes up the first adapters again.
    """
    placed = hf.distribute_pretrained(folder, dtype=torch.float64, adapt=with_lora, timeout_s=20)
    drawn = placed.state_dict()
    alone = with_lora(tiny("qwen3_moe", seed=1).double())
    alone.load_state_dict(drawn)
    with torch.no_grad():
        logits = [model.eval()(**batch(rank, 0, 0), use_cache=False).logits for model in (placed.model, alone)]
    factors = [by_expert(name, tensor) for name, tensor in drawn.items() if ".experts." in name and "lora_" in name]
    num_alike = sum(len(factor.unique(dim=0)) < 8 for factor in factors)
    first = peft.get_peft_model_state_dict(alone, {name: tensor * 2 for name, tensor in drawn.items()})
    peft.set_peft_model_state_dict(placed.model, first)
    again = peft.get_peft_model_state_dict(alone, placed.state_dict())
    took = all(torch.equal(again[name], tensor) for name, tensor in first.items())
    return float((logits[0] - logits[1]).abs().max()), (len(factors), num_alike), took


def test_a_folder_is_adapted_on_each_rank_and_no_two_experts_begin_alike(workers, tmp_path):
    tiny("qwen3_moe", seed=1).save_pretrained(tmp_path)
    for off, drawn, took in workers(2).run(loaded, tmp_path):
        assert off < WITHIN
        assert drawn == (12, 0)
        assert took


def adapted_late(rank):
    """What a forward says when PEFT comes after the experts were spread; a new adapter, and the first."""
    said = []
    for late in (False, True):
        model = tiny("qwen3_moe") if late else with_lora(tiny("qwen3_moe"))
        model = hf.distribute(model, timeout_s=20).model
        if late:
            model = with_lora(model)
        else:
            model.add_adapter("late", model.peft_config["default"])
            model.set_adapter("late")
        with pytest.raises(AttachError) as raised:
            model(input_ids=torch.arange(1, 9)[None])
        said.append(str(raised.value))
    return said


def test_adapters_that_come_late_are_refused(workers):
    for another, first in workers(2).run(adapted_late):
        assert another.startswith("adapter late of down_proj was added after the experts were spread")
        assert "mlp.experts were parametrized after it was distributed, as PEFT adapts experts" in first
