"""Which routes reach the experts in which pass of TRL: held against routes that the test has written down itself.

Also where the model is another when training begins: compiled by torch, or with kernels of Liger. These need a GPU: a
stand-in binds methods to instances, as Liger-Kernel does at ead96b6.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from types import MethodType, ModuleType

import numpy as np
import pytest
import torch
import trl
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM
from transformers.integrations import liger as of_transformers
from trl.trainer import utils

from examples.trl.tiny import policy
from foreroute.errors import AttachError, ConfigError
from tests.tiers import grid
from tests.trainers.given_experts import differing, follows, watched
from tests.trainers.trl.routes_book import Book, differing_cells, log_ratios
from tests.trainers.trl.test_trl_same import LORA
from tests.trainers.trl.trl_runs import SETTINGS, logged, make, saved_policy, trained

REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
CASES = {
    # settings, and how often TRL's old and update passes run over each sequence of a rollout
    "mini-batches": ({"gradient_checkpointing": False, "num_generations": 4}, 1, 2),
    "one-update": ({"num_iterations": 1, "steps_per_generation": 2, "per_device_train_batch_size": 4}, 0, 1),
    "reference": ({"beta": 0.1, "mask_truncated_completions": True, **REENTRANT}, 1, 2),
    "lora": ({"beta": 0.1, "peft_config": LORA}, 1, 2),
}
SEQUENCES = 8
"""In a rollout."""


@pytest.mark.shows("TRL", "`num_iterations`, `steps_per_generation`, `beta` with a reference")
@grid("name", CASES, quick=1)
def test_old_and_update_passes_take_the_routes_of_the_rollout_and_the_reference_its_own(name, folder):
    settings, num_old, num_updates = CASES[name]
    model = saved_policy(folder)
    book = Book(model)
    trainer = make(folder, model=model, rollout_func=book, **settings)
    with watched(model) as batches, watched(trainer.ref_model or model) as of_reference:
        trainer.train()
    ours = [batch for batch in batches if batch.adapters and not batch.is_alone]
    without_grad, updates = ([batch for batch in ours if batch.grad == grad] for grad in (False, True))
    of_check = SEQUENCES // trainer.args.per_device_train_batch_size
    natives = of_reference if trainer.ref_model else [batch for batch in batches if not batch.adapters]
    natives = natives + without_grad[:of_check]
    micro_steps = trainer.args.steps_per_generation * trainer.num_iterations
    rollouts = SETTINGS["max_steps"] * SETTINGS["gradient_accumulation_steps"] // micro_steps
    assert len(book.routes) == SEQUENCES * rollouts
    for passes, expected in ((without_grad[of_check:], num_old), (updates, num_updates)):
        seen = Counter(s for batch in passes for s, _ in batch.find(book.routes))
        assert seen == {s: expected for s in book.routes if expected}
        assert differing(passes, book.routes)[1] == 0
    recomputed = settings.get("gradient_checkpointing", True)
    assert all(len(batch.calls) == (6 if recomputed else 3) for batch in updates)
    assert sum(len(batch.ids) for batch in natives) == SEQUENCES * rollouts * ("beta" in settings) + SEQUENCES
    assert not any(follows(batch, book.routes) for batch in natives)
    assert set(logged(trainer, "mismatch/disagreement")) == {0.0}
    assert min(logged(trainer, "mismatch/native_disagreement")) > 0.01


def test_without_replay_the_same_passes_take_other_routes_and_the_mismatch_is_measured(folder):
    """The control of the test above, and the metrics beside a count by hand."""
    model = policy()
    book = Book(model)
    trainer = make(folder, model=model, rollout_func=book, replay="none", max_steps=1)
    with watched(model) as batches:
        trainer.train()
    assert not any(follows(batch, book.routes) for batch in batches if not batch.is_alone)
    log_r = log_ratios(book).astype(np.float64)
    cells = differing_cells(book)
    expected = {
        "mismatch/k3": np.mean(np.exp(log_r) - 1 - log_r),
        "mismatch/f2": np.mean(np.maximum(np.exp(log_r), np.exp(-log_r)) > 2),
        "mismatch/disagreement": np.mean(cells) / 3,
        "mismatch/disagreement_tokens": np.mean(np.array(cells) > 0),
    }
    assert 0.02 < expected["mismatch/f2"] < 0.5
    for name, value in expected.items():
        assert logged(trainer, name) == [pytest.approx(value, rel=1e-4)], name
    assert not logged(trainer, "mismatch/native_disagreement")


@pytest.mark.shows("TRL", "R2")
def test_r2_replays_what_the_old_pass_routed(folder):
    trainers, books = {}, {}
    for replay in ("R2", "none"):
        model = policy()
        books[replay] = book = Book(model, replaced=0.0)
        trainer = make(folder, model=model, rollout_func=book, replay=replay, learning_rate=1e-2)
        with watched(model) as batches:
            trainer.train()
        ours = [batch for batch in batches if not batch.is_alone]
        trainers[replay] = trainer, _changed_since_old(ours, book.routes)
    assert trainers["R2"][1] == 0
    assert trainers["none"][1] > 50
    assert not logged(trainers["R2"][0], "mismatch/disagreement")
    log_r = log_ratios(books["R2"]).astype(np.float64)
    assert logged(trainers["R2"][0], "mismatch/k3") == [pytest.approx(np.mean(np.exp(log_r) - 1 - log_r), rel=1e-4)]
    assert logged(trainers["R2"][0], "mismatch/native_disagreement")[1] > 0


@pytest.mark.slow
def test_a_resumed_run_has_the_experts_of_its_checkpoint_and_follows_the_routes_of_its_rollouts(folder):
    """TRL samples anew where it was cut in the middle of a rollout. Its own run gets the experts that it loses."""
    make(folder, cls=trl.GRPOTrainer, save_strategy="steps", save_steps=2, max_steps=2).train()
    middle = f"{folder}/checkpoint-2"
    runs, starts = {}, {"plain": {"cls": trl.GRPOTrainer}, "none": {"replay": "none"}, "R3": {}}
    for name, own in starts.items():
        model = Qwen3MoeForCausalLM.from_pretrained(middle) if name == "plain" else policy()
        book = Book(model)
        trainer = make(folder, model=model, rollout_func=book, **own)
        with watched(model) as batches:
            trainer.train(resume_from_checkpoint=middle)
        updates = [batch for batch in batches if batch.grad]
        assert len(updates) == 4
        assert [follows(batch, book.routes) for batch in updates] == [name == "R3"] * 4, name
        runs[name] = trainer
    for one, other in zip(runs["plain"].model.parameters(), runs["none"].model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert logged(runs["R3"], "mismatch/disagreement") == [0.0]
    assert logged(runs["none"], "mismatch/disagreement")[0] > 0.05
    best = make(folder)
    best.state.best_model_checkpoint = middle
    best._load_best_model()
    for name, weight in Qwen3MoeForCausalLM.from_pretrained(middle).state_dict().items():
        assert torch.equal(best.model.state_dict()[name], weight), name
    (weights,) = Path(middle).glob("*.safetensors")
    (lost, _), *others = load_file(weights).items()
    save_file(dict(others), weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=re.escape(lost)):
        make(folder).train(resume_from_checkpoint=middle)
    weights.unlink()
    best._load_best_model()  # a warning of transformers


def _changed_since_old(batches, sequences):
    """Rows that experts were given in update passes, and not in the old pass over the same sequence."""
    before = [batch for batch in batches if not batch.grad]
    old = {s: batch.ids_LRK()[:, rows].swapaxes(0, 1) for batch in before for s, rows in batch.find(sequences)}
    assert old.keys() == set(sequences), "the old pass has all"
    return differing([batch for batch in batches if batch.grad], old)[1]


def weights_of(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.shows("TRL", "`torch_compile`")
@pytest.mark.usefixtures("no_graphs_left")
@pytest.mark.exhaustive  # tests/adapters/hf/test_compile.py has compiled models by day
def test_a_compiled_model_replays_to_the_same_weights(folder):
    """test_trl_passes.py holds the run that is not compiled against the routes of the book."""
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    runs = {}
    for name, own in {"R3": {}, "compiled": compiled, "none": {"replay": "none"}}.items():
        model = policy()
        runs[name] = trained(folder, model=model, rollout_func=Book(model), max_steps=1, **own)
    assert torch.equal(weights_of(runs["compiled"]), weights_of(runs["R3"]))
    assert not torch.equal(weights_of(runs["none"]), weights_of(runs["R3"]))  # the control
    for name in ("loss", "mismatch/disagreement", "mismatch/native_disagreement", "mismatch/k3"):
        assert logged(runs["compiled"], name) == logged(runs["R3"], name)


def fused(experts, *given):
    """In the place of the method of a class, as a kernel is."""
    experts.fused_calls = True
    return type(experts).forward(experts, *given)


def sorting(gate, hidden):
    """A router in one kernel, in which nobody sees a selection."""
    scores = (hidden.reshape(-1, gate.hidden_dim) @ gate.weight.T).softmax(-1)
    weights, ids = (each[:, : gate.top_k] for each in scores.sort(descending=True))
    return scores, weights / weights.sum(-1, keepdim=True), ids


@pytest.fixture
def liger(monkeypatch):
    """Has the methods of modules, by the end of their class's name, that Liger replaces."""
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("Liger under this TRL is refused")
    methods = {"Experts": fused}

    def apply(model, **kernels):
        assert kernels == {"fused_linear_cross_entropy": False}
        for module in model.modules():
            for name, method in methods.items():
                if type(module).__name__.endswith(name):
                    module.__dict__["forward"] = MethodType(method, module)

    package, part = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    part._apply_liger_kernel_to_instance = apply
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", part)
    monkeypatch.setattr(of_transformers, "is_liger_kernel_available", lambda: True)
    return methods


@pytest.mark.slow
@pytest.mark.shows("TRL", "`use_liger_kernel` (a stand-in for its kernels)")
def test_experts_of_liger_are_given_the_routes_of_the_rollout(liger, folder):
    losses = []
    for fuses in (True, False):
        model = policy()
        book = Book(model)
        trainer = make(folder, model=model, rollout_func=book, max_steps=2, use_liger_kernel=fuses)
        with watched(model) as batches:
            trainer.train()
        assert all(follows(batch, book.routes) for batch in batches if batch.grad)
        assert any(hasattr(module, "fused_calls") for module in model.modules()) == fuses
        losses.append(logged(trainer, "loss"))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.slow
@pytest.mark.shows(
    "TRL", "Liger kernels that hold the router", refused="replay cannot reach a selection inside of a kernel"
)
def test_a_router_in_one_kernel_is_refused_at_construction(liger, folder):
    liger["Router"] = sorting
    with pytest.raises(AttachError, match="Router"):
        make(folder, use_liger_kernel=True)
