"""LoRA of PEFT on experts that are spread over ranks: against PEFT on one process, in float64, on all batches."""

from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist

from foreroute.adapters import hf
from foreroute.ep.compute import StackedReplicas
from foreroute.errors import AttachError, PlacementError
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, random_routes
from tests.ep.spread_steps import load_spread, run, sharded
from tests.ep.transfer.plans import split_plan

MATRICES = ["experts.gate_up_proj", "experts.down_proj"]
WITHIN = 1e-12
"""Of values near 1 in float64, which are sums of some hundred terms at most."""
RATE, LEAST = 1e-2, 1e-4
"""Of AdamW, which divides what is left of a gradient by no less than the latter."""
PLAN = 3
"""The seed of random replicas and splits; None for every expert at its home."""


def with_lora(model, seed=0, parameters=MATRICES):
    """With two adapters, whose factors are all drawn; the first is on."""
    torch.manual_seed(seed)
    draw = {"target_parameters": parameters, "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, **draw))
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=3, **draw))
    return model.eval()


def furthest(found, expected):
    """Of factors as ranks have them from those that PEFT lays out."""
    by_expert = {
        name: each.unflatten(1, (-1, 8)).movedim(2, 0) if "_B" in name else each.unflatten(0, (8, -1))
        for name, each in expected.items()
    }
    return max(float((found[name] - each).abs().max()) for name, each in by_expert.items())


class Pair:
    """The same adapted model on one process and on all, and a batch of each rank, every token with random routes."""

    def __init__(self, rank, family, folder):
        self.rank, self.batches = rank, [batch_of(9, 9, seed=each) for each in range(dist.get_world_size())]
        self.batch = self.batches[rank]
        self.alone = with_lora(tiny(family, seed=1).double())
        # ranks draw other factors, of which the first one's count
        mine = with_lora(load_spread(folder, dtype=torch.float64), seed=rank)
        state = torch.get_rng_state()
        with patch.object(torch.cuda, "manual_seed_all", side_effect=AssertionError("seeds every GPU")):
            self.model = hf.spread_adapters(mine)
        assert torch.equal(torch.get_rng_state(), state)
        self.plainly, self.routed = hf.attach(self.alone), hf.attach(self.model)
        self.traces = [random_routes(self.routed.spec, each, seed) for seed, each in enumerate(self.batches)]

    def contexts(self, *plan):
        """Those of a forward by the plan of a seed, or by no plan."""
        mine = [self.traces[self.rank]]
        if not plan:
            return [self.routed.replay(*mine)]
        counts_MLGE = self.routed.gather_counts(mine)
        made = None if plan == (None,) else split_plan(*plan, counts_MLGE, self.routed.home_LE)
        return [self.routed.execute(made, counts_MLGE, mine), self.routed.replay(*mine)]

    def expected(self):
        """Logits and gradients of one process, which are the mean over batches."""
        each = zip(self.batches, self.traces, strict=True)
        parts = [run(self.alone, batch, self.plainly.replay(trace)) for batch, trace in each]
        return parts[self.rank][0], {name: sum(part[1][name] for part in parts) / len(parts) for name in parts[0][1]}

    def off(self, expected, mean, *plan):
        """How far logits and gradients are off those of one process."""
        logits, grads = run(self.model, self.batch, *self.contexts(*plan))
        assert grads.keys() == mean.keys()
        assert len(mean) == 2 * 2 * 3
        return float((logits - expected).abs().max()), furthest(grads, mean)

    def logits(self, *plan):
        with torch.no_grad(), ExitStack() as stack:
            for each in [*self.contexts(*plan), self.plainly.replay(self.traces[self.rank])]:
                stack.enter_context(each)
            found, expected = (model(**self.batch, use_cache=False).logits for model in (self.model, self.alone))
        assert (found - expected).abs().max() < WITHIN
        return found

    def step(self, optimizers, *plan):
        """Train both; the factors are alike then, those of the ranks in order of ids."""
        grads = self.expected()[1]
        for name, each in self.alone.named_parameters():
            each.grad = grads.get(name)
        with ExitStack() as stack:
            for each in self.contexts(*plan):
                stack.enter_context(each)
            self.model(**self.batch, labels=self.batch["input_ids"], use_cache=False).loss.backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        assert furthest(dict(self.routed.gather_weights()), factors_of(self.alone)) < WITHIN


def factors_of(model):
    return {name: each.detach() for name, each in model.named_parameters() if "lora_" in name}


def trained(rank, family, folder):
    pair = Pair(rank, family, folder)
    truth = pair.expected()
    for plan in ((), (None,), (PLAN,)):
        assert max(pair.off(*truth, *plan)) < WITHIN, plan
    with patch.object(StackedReplicas, "add_returned", lambda self, returned, grads: list(grads)):
        of_logits, of_gradients = pair.off(*truth, PLAN)
    assert of_logits < WITHIN
    assert of_gradients > 1e-3, "the control: gradients of replicas are part of these"
    pair.model.train()
    pair.model.enable_input_require_grads()
    pair.model.gradient_checkpointing_enable()
    for plan in ((), (PLAN,)):
        assert max(pair.off(*truth, *plan)) < WITHIN, f"checkpointed, {plan}"
    assert {len(each.to_local()) for name, each in factors_of(pair.model).items() if "default" in name} == {4}


@pytest.mark.shows("Hugging Face", "LoRA on experts under expert parallelism, with executed plans")
@pytest.mark.slow
def test_logits_and_gradients_are_those_of_one_process(workers, folder_of):
    workers(2).run(trained, "gpt_oss", folder_of("gpt_oss"))


SWITCHES = [
    (lambda model: model.merge_adapter(), False),
    (lambda model: model.unmerge_adapter(), False),
    (lambda model: model.set_adapter("other"), True),
    (lambda model: model.base_model.disable_adapter_layers(), True),
    (lambda model: model.base_model.enable_adapter_layers(), True),
]
"""One after the other, and whether logits are others then than at first."""


def lived(rank, folder):
    pair = Pair(rank, "qwen3_moe", folder)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=RATE, eps=LEAST) for each in (sharded(pair.model), pair.alone)
    ]
    pair.step(optimizers, PLAN)
    first = pair.logits()
    pair.logits(PLAN)
    for switch, changes in SWITCHES:
        for model in (pair.model, pair.alone):
            switch(model)
        for plan in ((), (PLAN,)):
            off = (pair.logits(*plan) - first).abs().max()
            assert off > 1e-3 if changes else off < WITHIN
    pair.step(optimizers, PLAN)
    pair.routed.move_homes(np.random.default_rng(0).permuted(pair.routed.home_LE, axis=1), optimizers[0])
    for refused in (pair.model.state_dict, lambda: hf.spread_adapters(pair.model)):
        with pytest.raises(PlacementError):
            refused()
    for step in range(2):
        pair.step(optimizers, PLAN + step)
    pair.routed.move_homes(pair.routed.block_home_LE, optimizers[0])
    pair.step(optimizers)
    pair.model, pair.alone = (each.unload() for each in (pair.model, pair.alone))
    assert (pair.logits(PLAN) - first).abs().max() > 1e-3


@pytest.mark.slow
def test_adapters_are_trained_switched_merged_moved_and_unloaded_as_on_one_process(workers, folder_of):
    workers(2).run(lived, folder_of("qwen3_moe"))


def saved(rank, folder, written):
    """Write adapters, and take up what PEFT makes of them."""
    model = hf.spread_adapters(with_lora(load_spread(folder, dtype=torch.float64)))
    model.save_pretrained(written, is_main_process=rank == 0)
    given = {name: 2 * each for name, each in peft.get_peft_model_state_dict(model).items()}
    peft.set_peft_model_state_dict(model, given)
    taken = peft.get_peft_model_state_dict(model)
    assert all(torch.equal(taken[name], each) for name, each in given.items())


@pytest.mark.slow
def test_peft_loads_what_ranks_save_together_and_ranks_load_it(workers, folder_of, tmp_path):
    written = tmp_path / "adapters"
    workers(2).run(saved, folder_of("qwen3_moe"), written)
    loaded = peft.PeftModel.from_pretrained(tiny("qwen3_moe", seed=1).double(), written)
    loaded.load_adapter(written / "other", "other")
    expected = factors_of(with_lora(tiny("qwen3_moe", seed=1).double()))
    assert len(expected) == 2 * 2 * 2 * 3
    assert all(torch.equal(each, expected[name]) for name, each in factors_of(loaded).items())


def refused(rank, folder):
    """Adapters that are not spread, are added later, or are none that can be spread."""

    def require_refused(said, function, *args, **kwargs):
        with pytest.raises(AttachError, match=said):
            function(*args, **kwargs)

    def spread():
        return load_spread(folder, dtype=torch.float64)

    model, batch = with_lora(spread()), batch_of(9, seed=rank)
    whole = r"all experts.*only some.*hf\.spread_adapters"
    require_refused(rf"^adapter default.*gate_up_proj .*{whole}", hf.attach, model)
    hf.spread_adapters(model)
    model.add_adapter("late", model.peft_config["default"])
    model(**batch)
    model.set_adapter("late")
    require_refused(rf"^adapter late.*down_proj .*{whole}", model, **batch)
    hf.spread_adapters(model)(**batch)
    none = r"^no experts.*FSDPGptOssForCausalLM .*adapters.*spread"
    require_refused(none, hf.spread_adapters, spread())
    of_bias = with_lora(spread(), parameters=["experts.down_proj_bias"])
    by_another = r"ParamWrapper.*down_proj_bias; .*PEFT 0\.21 on gate_up_proj"
    require_refused(by_another, hf.spread_adapters, of_bias)


@pytest.mark.slow
def test_adapters_that_are_not_spread_are_refused_and_by_name(workers, folder_of):
    workers(2).run(refused, folder_of("gpt_oss"))
