"""Replay of integer tensors, on torch alone: against traces, checkpoints by hand, and what is wrong with ids."""

import re
import runpy
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import foreroute as fr
from foreroute.adapters import hf
from foreroute.core import ReplayError, attach
from foreroute.core.route_ids import INTEGERS, UNSIGNED
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, experts_log, gradients, loss_of
from tests.python_calls import calls_per_layer
from tests.replay.session_subject import same
from tests.tiers import grid

BATCH = batch_of(9, 6, 4)


def with_own_routes(model=None):
    """A model, attached, with what it picks by itself, and its logits."""
    model = model or tiny("qwen3_moe")
    routed = attach(model)
    with routed.record() as recording, torch.no_grad():
        logits = model(**BATCH, use_cache=False).logits
    return model, routed, recording.ids()[0], logits


def test_tensors_and_traces_are_replayed_alike():
    """Bits of the loss and of every gradient, routers' among them."""
    ids = torch.rand((3, 9, 2, 8), generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :2]
    ids, seen = torch.where(BATCH["attention_mask"][..., None, None] > 0, ids, -1), []
    for is_trace in (True, False):
        model = tiny("deepseek_v3").train()
        routed = (hf.attach if is_trace else attach)(model)
        if is_trace:
            given = [fr.RoutingTrace.from_padded(routed.spec, BATCH["input_ids"], ids, BATCH["attention_mask"])]
        else:
            given = [ids, BATCH["attention_mask"]]
        with routed.replay(*given):
            loss_of(model, BATCH).backward()
        seen.append(gradients(model))
    assert same(*seen)


@grid("num_experts", [127, 128, 256, 32_768], quick=2)
def test_every_number_of_experts_is_attached_and_replayed(num_experts):
    """Ids are kept in the narrowest type that has -1 and E - 1, which may lack E: 128 of Qwen3-30B-A3B is one."""
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = tiny("qwen3_moe", num_experts=num_experts, hidden_size=8, moe_intermediate_size=4, **one_head)
    routed = hf.attach(model)
    _, tensors, own, native = with_own_routes(model)
    last = torch.arange(own[..., 0].numel(), dtype=own.dtype).view(own.shape[:-1]) % 2 + num_experts - 2
    ids = torch.stack((last, torch.zeros_like(last)), -1)
    trace = fr.RoutingTrace.from_padded(routed.spec, BATCH["input_ids"], ids, BATCH["attention_mask"])
    for replayed in (routed.replay(trace, telemetry=True), tensors.replay(ids, BATCH["attention_mask"])):
        with replayed, experts_log(model) as log, torch.no_grad():
            assert not torch.equal(model(**BATCH, use_cache=False).logits, native)
        real_R = BATCH["attention_mask"].flatten().bool()
        assert len(log) == ids.shape[2]
        for layer, (_, ids_RK) in enumerate(log):
            assert torch.equal(ids_RK[real_R], ids[:, :, layer].flatten(0, 1)[real_R])


def test_own_routes_change_no_bit_and_others_are_counted():
    model, routed, own, native = with_own_routes()
    rows = routed.rows(own, BATCH["attention_mask"])  # made once and replayed often
    for session in (routed.replay(own, BATCH["attention_mask"]), routed.replay(rows), routed.replay(rows)):
        with session, torch.no_grad():
            assert torch.equal(model(**BATCH, use_cache=False).logits, native)
    real = 3 * int(BATCH["attention_mask"].sum())
    assert [tuple(line)[1:] for line in routed.report()] == [(real, 0)] * len(routed.report())
    other = own.clone()
    other[0, 0, -1, 0] = next(e for e in range(8) if e not in own[0, 0, -1])  # in the last layer, behind which none is
    other[:, 1:] = -1
    with routed.replay(other), torch.no_grad():
        model(**BATCH, use_cache=False)
    lines = routed.report()
    assert [(line.replayed - real, line.differing) for line in lines] == [(3, 0), (3, 0), (3, 1)]
    assert lines[1].path == "model.layers.1.mlp.gate"


@pytest.mark.parametrize(
    ("change", "said"), [([99], r"id out.*range"), ([3, 3], r"expert twice"), ([-1], "-1 beside experts")]
)
def test_ids_that_cannot_be_take_no_effect_and_are_told(change, said):
    model, routed, own, native = with_own_routes()
    wrong, mask = own.clone(), BATCH["attention_mask"]
    wrong[0, 2, 1, : len(change)] = torch.tensor(change)
    with pytest.raises(ReplayError, match=f"1 rows with.*{said}"), routed.replay(wrong, mask), torch.no_grad():
        logits = model(**BATCH, use_cache=False).logits
    assert torch.equal(logits, native)  # and so the forward itself raised nothing
    routed.report()


def test_ids_of_other_shapes_and_types_are_refused_and_sessions_without_a_forward():
    model, routed, own, _ = with_own_routes()
    for ids, said in (
        (own.float(), r"ids are.*torch\.float32"),
        (own[:, :, :1], r"\[L, K\] = \[1, 2\]; .*3 routers"),
        (own[:2], r"attention_mask is \[3, 9\], ids are \[2, 9, 3, 2\]"),
        (own, r"nothing.*replayed"),
    ):
        with pytest.raises(ReplayError, match=said), routed.replay(ids, BATCH["attention_mask"]):
            pass
    with pytest.raises(ReplayError, match=r"nothing.*recorded.*thread"), routed.record():
        pass
    with pytest.raises(ReplayError, match=r"\[3, 8\] \[B, T\].*routes.*\[3, 9\]"), routed.replay(own):
        model(input_ids=BATCH["input_ids"][:, 1:])
    own[torch.arange(3), BATCH["attention_mask"].sum(1) - 1] = -1  # the last of each sequence is before no other
    with routed.replay(own, BATCH["attention_mask"], missing="error"):
        model(**BATCH, use_cache=False)
    own[1, 2] = -1  # later tokens depend on it
    refused = pytest.raises(ReplayError, match=r"1.*-1.*tokens depend")
    with refused, routed.replay(own, BATCH["attention_mask"], missing="error"):
        model(**BATCH, use_cache=False)


@pytest.mark.slow
def test_examples_run(capsys):
    """In a plain loop, and from the tensors of SkyRL and verl as they are: 13 rows have a route, in two replays."""
    for script, printed in (
        ("plain_loop.py", r"step 2: loss -?\d\.\d+, \d+ rows"),
        ("as_they_are.py", r"losses \[(\S+), \1\]; 26 rows of each router"),
    ):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "core" / script), run_name="__main__")
        assert re.search(printed, capsys.readouterr().out)


@grid("dtype", INTEGERS, quick=2, ids=str)
def test_ids_of_every_integer_type_are_replayed(dtype):
    """In an unsigned one -1 is its largest number: not recorded in all picks of a row, too large in one of them."""
    model, routed, own, native = with_own_routes()
    other = (own.long() + 1) % 8
    other[0, 3] = -1

    def replay(ids):
        with torch.no_grad(), routed.replay(ids, BATCH["attention_mask"]):
            return model(**BATCH, use_cache=False).logits

    seen = [replay(ids) for ids in (other, other.to(dtype))]
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], native)
    other[0, 3, :, 0] = 5
    with pytest.raises(ReplayError, match=r"3 rows.*range" if dtype in UNSIGNED else "3 rows with -1 beside"):
        replay(other.to(dtype))


@pytest.mark.parametrize(("use_reentrant", "most"), [(None, 16), pytest.param(False, 52, marks=pytest.mark.slow)])
def test_a_layer_costs_few_calls(use_reentrant, most):
    """Forward and backward, however many guards there are; recomputed layers run twice, each in its own pass."""

    @contextmanager
    def steps(layers):
        model = tiny("qwen3_moe", num_hidden_layers=layers, norm_topk_prob=False)
        enable_checkpointing(model, use_reentrant)
        _, routed, routes, _ = with_own_routes(model)
        with routed.replay(routes, BATCH["attention_mask"]):
            yield lambda: loss_of(model, BATCH).backward()

    assert 1 < calls_per_layer(steps) <= most
