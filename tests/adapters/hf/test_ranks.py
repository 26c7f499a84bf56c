"""Data parallel training and transformers' parallelism, held against one model with its experts forced by hand."""

import io
import re
from contextlib import nullcontext, redirect_stdout
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from foreroute.adapters import hf
from foreroute.core import untouched
from foreroute.testing.models import tiny
from tests.adapters.hf.families import skip_where_nothing_is_spread
from tests.adapters.hf.model_runs import (
    EXPERTS,
    batch_of,
    enable_checkpointing,
    forced_by_hand,
    gradients,
    log_probs_of,
    loss_of,
    random_routes,
    whole,
    with_lora,
)
from tests.ep.spread_steps import sharded
from tests.replay.session_subject import same
from tests.roundings import GRADIENT_TERMS, require_rounded, roundings

BATCH = batch_of(9, 9, 6, 6)
"""Data parallel ranks take every second sequence: both have as many tokens, so that the mean of losses is the loss."""
PROMPTS = batch_of(5, 5)["input_ids"]
BY_TRANSFORMERS = {
    "tensor parallel": {"tp_size": 2, "tp_plan": "auto"},
    "expert parallel": {"tp_size": 2, "ep_size": 2, "tp_plan": {"lm_head": "colwise_gather_output"}},
    "expert parallel over FSDP2": {"fsdp_size": 2, "ep_size": 2},
}


def step(model, batch, session=None):
    """Logits and gradients, whole; the backward, with its recomputation, outside of the session."""
    with session or nullcontext():
        logits = whole(model(**batch, use_cache=False).logits)
    (-log_probs_of(logits, batch).mean()).backward()
    found = {name.removeprefix("module."): each for name, each in gradients(model).items()}
    model.zero_grad()
    return logits.detach()[batch["attention_mask"].bool()], found


def shard(model):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def policy(way=""):
    model = tiny("qwen3_moe")
    if "adapters" in way:
        model.enable_input_require_grads()
        model = with_lora(model, target_modules=["o_proj"], **EXPERTS)
    return model


def base_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def on_rank(rank, way, folder):
    """Whether own routes change no bit, logits and gradients of foreign ones, and the rollout of a generation."""
    if way in BY_TRANSFORMERS:
        config, routed = DistributedConfig(**BY_TRANSFORMERS[way]), None
        called = model = Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=config)
        assert model.model.layers[0].mlp.experts.gate_up_proj.to_local().numel() * 2 == 8 * 48 * 32, "cut in two"
    else:
        called = model = policy(way)
        routed = hf.attach(model) if way == "FSDP2" else None
        if way == "DDP":
            called = DistributedDataParallel(model)
        else:
            shard(base_of(model))
    routed = routed or hf.attach(model)
    mine = slice(rank, None, 2) if is_data_parallel(way) else slice(None)
    batch = {name: value[mine] for name, value in BATCH.items()}
    with routed.record() as recording:
        sampled = model.eval().generate(PROMPTS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    rollout = recording.rollout(sampled).expert_ids_NLK
    enable_checkpointing(base_of(model), False)
    native = step(called.train(), batch)
    with routed.record() as recording:
        step(called, batch)
    own = step(called, batch, routed.replay(recording.trace()))
    foreign = random_routes(routed.spec, BATCH).select(np.arange(4)[mine])
    is_same = torch.equal(own[0], native[0]) and same(own[1], native[1])
    return is_same, *step(called, batch, routed.replay(foreign)), (sampled, rollout)


def is_data_parallel(way):
    return way == "DDP" or "FSDP2" in way


@lru_cache
def plain(way="", seed=1):
    model = policy(way).train()
    trace = random_routes(hf.attach(tiny("qwen3_moe")).spec, BATCH, seed)
    with forced_by_hand(model, trace, BATCH):
        return model, *step(model, BATCH)


@pytest.mark.shows("Hugging Face", "DDP and FSDP2, two processes")
@pytest.mark.shows("Hugging Face", "tensor parallelism, expert parallelism and EP over FSDP2 of transformers")
@pytest.mark.parametrize(
    "way",
    [
        *("DDP", "FSDP2"),
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("FSDP2, with adapters", *BY_TRANSFORMERS)),
    ],
)
def test_replay_is_that_of_a_model_on_its_own(workers, way, tmp_path):
    if way in BY_TRANSFORMERS:
        skip_where_nothing_is_spread()
    tiny("qwen3_moe").save_pretrained(tmp_path)
    model, logits, grads = plain("adapters" if "adapters" in way else "")
    real = BATCH["attention_mask"].bool()
    number_BT = torch.zeros(real.shape, dtype=torch.long)
    number_BT[real] = torch.arange(len(logits))
    for rank, results in enumerate(workers(2).run(on_rank, way, tmp_path)):
        is_same, seen, found, (sampled, ids_NLK) = results
        assert is_same, "own routes change no bit"
        mine = slice(rank, None, 2) if is_data_parallel(way) else slice(None)
        require_rounded(seen, logits[number_BT[mine][real[mine]]])
        assert found.keys() == grads.keys()
        for name, gradient in grads.items():
            require_rounded(found[name], gradient, GRADIENT_TERMS)
            assert gradient.any(), name
        # what was recorded of a generation is what one forward over it selects
        with torch.no_grad():
            picks = base_of(model)(sampled[:, :-1], output_router_logits=True, use_cache=False).router_logits
        for layer, logits_RE in enumerate(picks):
            own = logits_RE.topk(2).indices.sort(-1).values.view(len(sampled), -1, 2)
            recorded = np.sort(ids_NLK[:, layer].reshape(len(sampled), -1, 2)[:, :-1], axis=-1)
            assert np.array_equal(own, recorded)


def test_other_routes_would_be_seen():
    """The control: gradients under other routes are a hundred times further off than roundings explain."""
    (_, _, expected), (_, _, other) = plain(), plain(seed=2)
    name = "model.layers.1.mlp.gate.weight"
    away = (other[name] - expected[name]).abs().max() / expected[name].abs().max()
    assert away > 100 * roundings(GRADIENT_TERMS)


def weights_after_training(rank, attaching, mended=True):
    """Names of parameters that never moved, and all of them, after three steps of an optimizer made after attaching."""
    model = shard(policy())
    with pytest.MonkeyPatch.context() as patch:
        if not mended:
            patch.setattr(untouched, "reshard", lambda model: None)
            patch.setattr(untouched, "_replaced", lambda standing: [])
            patch.setattr(untouched._Values, "put_back", lambda values: None)
        routed = hf.attach(model) if attaching else None
        optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), full_weights(model)
        mine = {name: value[rank::2] for name, value in BATCH.items()}
        for _ in range(3):
            session = nullcontext()
            if routed is not None:
                with torch.no_grad(), routed.record() as recording:
                    model(**mine)
                for group in optimizer.param_groups:  # as one made now would have them
                    group["params"] = list(model.parameters())
                session = routed.replay(recording.trace())
            with session:
                loss = loss_of(model, mine)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    after = full_weights(model)
    return [name for name in before if torch.equal(before[name], after[name])], after


def full_weights(model):
    return {name: whole(each).detach().clone() for name, each in sharded(model).named_parameters()}


@pytest.mark.slow
def test_an_optimizer_trains_what_it_would_without_attaching_and_recording(workers):
    runs = [workers(2).run(weights_after_training, *case) for case in ((False,), (True,), (True, False))]
    (without, plain), (attached, ours), (lost, _) = (ranks[0] for ranks in runs)
    assert attached == without
    assert all(torch.equal(ours[name], plain[name]) for name in plain)
    assert len(lost) > len(without)  # the control: a forward without backward, and nothing put back


PAGE = Path(__file__).parents[3] / "docs" / "huggingface.md"


def run_page(rank):
    """Its loop and what it appends for FSDP2, in the group that is there: what was printed, and the weights after."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (appended,) = [block for block in blocks if "fully_shard" in block]
    page = {"__name__": "__main__"}
    group = patch.multiple(dist, init_process_group=lambda backend: None, destroy_process_group=lambda: None)
    with group, redirect_stdout(io.StringIO()) as printed:
        exec(blocks[0], page)
        exec(appended, page)
    return printed.getvalue(), [whole(parameter).detach() for parameter in page["model"].parameters()]


@pytest.mark.slow
def test_the_page_runs_on_two_ranks(workers):
    (printed, one), (_, other) = workers(2).run(run_page)
    assert printed.count("k3 ") == 2
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "they are one model"
