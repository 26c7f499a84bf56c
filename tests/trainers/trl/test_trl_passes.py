"""Which routes reach the experts in which pass of TRL: held against routes that the test has written down itself."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import trl
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from examples.trl.tiny import policy
from foreroute.errors import ConfigError
from tests.trainers.given_experts import differing, follows, watched
from tests.trainers.trl.routes_book import Book, differing_cells, log_ratios
from tests.trainers.trl.test_trl_same import LORA
from tests.trainers.trl.trl_runs import SETTINGS, logged, make, saved_policy

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


@pytest.fixture(params=["mini-batches", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CASES][1:])])
def run(request, folder):
    """A trainer that has trained, its book, and what ran: the check of a rollout, old, update and reference passes."""
    settings, *_ = CASES[request.param]
    model = saved_policy(folder)
    book = Book(model)
    trainer = make(folder, model=model, rollout_func=book, **settings)
    reference = trainer.ref_model or model
    with watched(model) as batches, watched(reference) as of_reference:
        trainer.train()
    ours = [batch for batch in batches if batch.adapters and not batch.is_alone]
    without_grad = [batch for batch in ours if not batch.grad]
    of_check = SEQUENCES // trainer.args.per_device_train_batch_size
    theirs = of_reference if trainer.ref_model else [batch for batch in batches if not batch.adapters]
    passes = {
        "check": without_grad[:of_check],
        "old": without_grad[of_check:],
        "update": [batch for batch in ours if batch.grad],
        "reference": theirs,
    }
    return request.param, trainer, book, passes


@pytest.mark.shows("TRL", "`num_iterations`, `steps_per_generation`, `beta` with a reference")
def test_old_and_update_passes_take_the_routes_of_the_rollout_and_the_reference_its_own(run):
    name, trainer, book, passes = run
    settings, num_old, num_updates = CASES[name]
    micro_steps = trainer.args.steps_per_generation * trainer.num_iterations
    rollouts = SETTINGS["max_steps"] * SETTINGS["gradient_accumulation_steps"] // micro_steps
    assert len(book.routes) == SEQUENCES * rollouts
    for kind, expected in (("old", num_old), ("update", num_updates)):
        seen = Counter(s for batch in passes[kind] for s, _ in batch.find(book.routes))
        assert seen == {s: expected for s in book.routes if expected}, kind
        assert differing(passes[kind], book.routes)[1] == 0, kind
    recomputed = settings.get("gradient_checkpointing", True)
    assert all(len(batch.calls) == (6 if recomputed else 3) for batch in passes["update"])
    natives = passes["check"] + passes["reference"]
    expected = SEQUENCES * rollouts * ("beta" in settings) + SEQUENCES
    assert sum(len(batch.ids) for batch in natives) == expected
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
    make(folder, kind=trl.GRPOTrainer, save_strategy="steps", save_steps=2, max_steps=2).train()
    middle = f"{folder}/checkpoint-2"
    runs, starts = {}, {"plain": {"kind": trl.GRPOTrainer}, "none": {"replay": "none"}, "R3": {}}
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
    """Picks of update passes that are not those of the old pass over the same sequence, which comes before it."""
    old, changed = {}, 0
    for batch in batches:
        for tokens, rows in batch.find(sequences):
            ids = batch.ids_LRK()[:, rows]
            if batch.grad:
                changed += int((ids != old[tokens]).sum())
            else:
                old[tokens] = ids
    return changed
