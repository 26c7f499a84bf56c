"""transformers' own parallelism: replay on two processes is that of one model on its own, its experts forced by hand.

Tensor parallelism and expert parallelism on one batch, and expert parallelism over FSDP2 on a batch of each rank.
"""

from contextlib import closing, nullcontext

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from foreroute.adapters import hf
from foreroute.testing.models import tiny
from foreroute.testing.ranks import Workers
from tests.adapters.hf.families import skip_where_nothing_is_spread
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, forced_by_hand, gradients, random_routes, whole
from tests.replay.session_subject import same
from tests.roundings import GRADIENT_TERMS, require_rounded

BATCH = batch_of(9, 9, 6, 6)
PROMPTS = batch_of(5, 5)["input_ids"]
WAYS = {
    "tensor parallel": {"tp_size": 2, "tp_plan": "auto"},
    "expert parallel": {"tp_size": 2, "ep_size": 2, "tp_plan": {"lm_head": "colwise_gather_output"}},
    "tensor and expert parallel": {"tp_size": 2, "ep_size": 2, "tp_plan": "auto"},
    "expert parallel over FSDP2": {"fsdp_size": 2, "ep_size": 2},
}


def loss_and_logits(model, batch):
    """The next tokens that are no padding: each rank has as many, so that the mean of ranks is the loss."""
    logits = whole(model(**batch, use_cache=False).logits)
    real = batch["attention_mask"][:, 1:].bool()
    targets = batch["input_ids"][:, 1:]
    picked = logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return -picked[real].mean(), logits[batch["attention_mask"].bool()]


def step(model, batch, session=None):
    """Logits and gradients, whole; the backward, with its recomputation, outside of the session."""
    with session or nullcontext():
        loss, logits = loss_and_logits(model, batch)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return logits.detach(), found


def on_rank(rank, folder, use_reentrant):
    """For each way: whether own routes change no bit, what comes of foreign ones, and the rollout of a generation."""
    results = []
    for config in WAYS.values():
        model = Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**config))
        routed = hf.attach(model)
        mine = slice(rank, None, 2) if "fsdp_size" in config else slice(None)
        batch = {name: value[mine] for name, value in BATCH.items()}
        with routed.record() as recording:
            sampled = model.eval().generate(PROMPTS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        rollout = recording.rollout(sampled)
        enable_checkpointing(model.train(), use_reentrant)
        native = step(model, batch)
        with routed.record() as recording:
            step(model, batch)
        own = step(model, batch, routed.replay(recording.trace()))
        foreign = random_routes(routed.spec, BATCH).select(np.arange(4)[mine])
        assert model.model.layers[0].mlp.experts.gate_up_proj.to_local().numel() * 2 == 8 * 48 * 32, "cut in two"
        is_same = torch.equal(own[0], native[0]) and same(own[1], native[1])
        results.append((is_same, *step(model, batch, routed.replay(foreign)), (sampled, rollout.expert_ids_NLK)))
    return results


@pytest.fixture(scope="module")
def plain():
    model = tiny("qwen3_moe").train()
    trace = random_routes(hf.attach(tiny("qwen3_moe")).spec, BATCH)
    with forced_by_hand(model, trace, BATCH):
        return model, *step(model, BATCH)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.exhaustive)])
def ranks(request, tmp_path_factory):
    skip_where_nothing_is_spread()
    folder = tmp_path_factory.mktemp("model")
    tiny("qwen3_moe").save_pretrained(folder)
    with closing(Workers(2, timeout_s=300)) as workers:
        return workers.run(on_rank, folder, request.param)


@pytest.mark.shows("Hugging Face", "tensor parallelism, expert parallelism and EP over FSDP2 of transformers")
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_replay_is_that_of_a_model_on_its_own(ranks, plain, way):
    model, logits, grads = plain
    real = BATCH["attention_mask"].bool()
    number_BT = torch.zeros(real.shape, dtype=torch.long)
    number_BT[real] = torch.arange(len(logits))
    for rank, results in enumerate(ranks):
        is_same, seen, found, (sampled, ids_NLK) = results[list(WAYS).index(way)]
        assert is_same, "own routes change no bit"
        mine = slice(rank, None, 2) if "FSDP2" in way else slice(None)
        require_rounded(seen, logits[number_BT[mine][real[mine]]])
        assert found.keys() == grads.keys()
        for name, gradient in grads.items():
            require_rounded(found[name], gradient, GRADIENT_TERMS)
        # what was recorded of a generation is what one forward over it selects
        with torch.no_grad():
            picks = model(sampled[:, :-1], output_router_logits=True, use_cache=False).router_logits
        for layer, logits_RE in enumerate(picks):
            own = logits_RE.topk(2).indices.sort(-1).values.view(len(sampled), -1, 2)
            recorded = np.sort(ids_NLK[:, layer].reshape(len(sampled), -1, 2)[:, :-1], axis=-1)
            assert np.array_equal(own, recorded)
