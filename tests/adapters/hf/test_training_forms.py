"""What training puts around a model: adapters, selective checkpoints, half precision, a Trainer.

Own routes change no bit of loss or gradients against the same without replay; of others, experts get exactly those.
"""

import collections
import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from foreroute.adapters import hf
from foreroute.testing.models import tiny
from tests.adapters.hf.family_checks import require_bit_equal
from tests.adapters.hf.model_runs import (
    batch_of,
    checkpointed_by_library,
    enable_checkpointing,
    experts_log,
    forced_by_hand,
    gradients,
    log_probs,
    loss_of,
    random_routes,
    with_lora,
)
from tests.replay.session_subject import same
from tests.tiers import grid

BATCH = batch_of(9, 6, 4)
aten = torch.ops.aten


def adapted(use_reentrant, **options):
    model = with_lora(tiny("qwen3_moe"), **options)
    model.get_base_model().enable_input_require_grads()
    enable_checkpointing(model.get_base_model(), use_reentrant)
    return model.train()


@pytest.mark.shows("Hugging Face", "PEFT's LoRA, on experts and routers too")
@grid(
    ("options", "use_reentrant"),
    [({}, True), ({"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]}, False)],
    quick=1,
    ids=["attention", "experts and routers"],
)
def test_own_routes_change_no_bit_and_experts_get_others_also_in_recomputation(options, use_reentrant):
    untouched, model = adapted(use_reentrant, **options), adapted(use_reentrant, **options)
    routed, loss_of_batch = hf.attach(model), partial(loss_of, batch=BATCH)
    session = require_bit_equal(untouched, model, routed, loss_of_batch, telemetry=True)
    assert session.agreement().differing_tokens_share == 0
    trace = random_routes(routed.spec, BATCH)
    with experts_log(model) as log:
        with routed.replay(trace):
            loss = loss_of(model, BATCH)
        loss.backward()
    layers = {path: layer for layer, path in enumerate(sorted({path for path, _ in log}))}
    assert len(layers) == routed.spec.num_layers
    assert len(log) == 2 * len(layers)
    real_R = BATCH["attention_mask"].bool().reshape(-1)
    for path, ids in log:
        assert np.array_equal(ids[real_R].numpy(), trace.expert_ids_NLK[:, layers[path]])


def second_products():
    """As torchtitan keeps them: the results of every second product, and all of what moves rows."""
    seen = collections.Counter()

    def policy(context, op, *args, **kwargs):
        seen[context.is_recompute, op] += op is aten.mm.default
        kept = op is aten._grouped_mm.default or seen[context.is_recompute, op] % 2
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


SELECTIVE = {
    "top-k": lambda: create_selective_checkpoint_contexts([aten.topk.default]),
    "second products": second_products,
}


@pytest.mark.shows("Hugging Face", "selective activation checkpoints (`context_fn`)")
@grid(("family", "kept"), zip(itertools.cycle(["qwen3_moe", "gpt_oss", "deepseek_v3"]), SELECTIVE), quick=2)
def test_selective_checkpoints_repeat_what_the_forward_ran(family, kept):
    """Rows without a route among those with one. The oracle is the same without checkpoints."""
    seen = []
    for is_checkpointed in (False, True):
        model = tiny(family).train()
        if is_checkpointed:
            checkpointed_by_library(model, {"use_reentrant": False, "context_fn": SELECTIVE[kept]})
        routed = hf.attach(model)
        trace = random_routes(routed.spec, BATCH)
        trace = replace(trace, valid_N=trace.valid_N & (np.arange(trace.num_rows) % 3 > 0))
        with routed.record() as recording, routed.replay(trace, missing="native", telemetry=True) as session:
            losses = [loss_of(model, BATCH), loss_of(model, BATCH)]
        for loss in losses:
            loss.backward()
        seen.append((gradients(model), recording.trace(), session.agreement().shared_L.tolist()))
    assert same(seen[0][0], seen[1][0])
    assert seen[0][1].equals(seen[1][1])
    assert seen[0][2] == seen[1][2]


@pytest.mark.shows("Hugging Face", "`model.half()`")
def test_a_model_of_half_precision_takes_other_routes():
    model = tiny("qwen3_moe").half()
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with torch.no_grad():
        with forced_by_hand(model, trace, BATCH):
            expected = log_probs(model, BATCH)
        with routed.replay(trace):
            assert torch.equal(log_probs(model, BATCH), expected)
        assert not torch.equal(log_probs(model, BATCH), expected), "the control"


def trained(tmp_path, model, routes, **options):
    """Weights after two steps of four micro-batches of Trainer; `routes(numbers, batch)` is open in their forwards."""
    from transformers import Trainer, TrainingArguments  # which takes seconds

    class Replaying(Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            with routes(inputs.pop("number").tolist(), inputs):
                return super().compute_loss(model, inputs, **kwargs)

    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2, "use_cpu": True}
    options |= {"learning_rate": 0.1, "optim": "sgd", "remove_unused_columns": False, "save_strategy": "no"}
    arguments = TrainingArguments(tmp_path, report_to=[], **options)
    rows = [
        {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "number": number}
        for number, ids in enumerate(ACCUMULATED["input_ids"])
    ]
    Replaying(model, arguments, train_dataset=rows).train()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


ACCUMULATED = batch_of(*[6] * 16)


@pytest.mark.shows("Hugging Face", "Trainer with gradient accumulation, the replay opened in `compute_loss`")
@pytest.mark.slow
def test_a_trainer_that_accumulates_makes_the_weights_of_routes_forced_by_hand(tmp_path):
    plain, model = tiny("qwen3_moe"), tiny("qwen3_moe")
    routed = hf.attach(model)
    trace = random_routes(routed.spec, ACCUMULATED)
    expected = trained(tmp_path, plain, lambda numbers, batch: forced_by_hand(plain, trace.select(numbers), batch))
    seen = trained(
        tmp_path, model, lambda numbers, _: routed.replay(trace.select(numbers)), gradient_checkpointing=True
    )
    assert same(seen, expected)
    native, router = trained(tmp_path, tiny("qwen3_moe"), lambda *_: nullcontext()), "model.layers.1.mlp.gate.weight"
    for other in (native, tiny("qwen3_moe").state_dict()):
        assert not torch.equal(seen[router], other[router]), "the control"
