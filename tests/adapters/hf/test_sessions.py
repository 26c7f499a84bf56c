"""What a session may and may not touch, beyond what the kit asks: other passes, the model after it closes."""

import ast
import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed._composable
from torch.utils.checkpoint import checkpoint

import foreroute as fr
from foreroute.adapters import hf
from foreroute.errors import AttachError, BatchMismatchError, ReplayError
from foreroute.replay import ReplayRows
from foreroute.testing.models import FAMILIES, GROUPED, tiny
from tests.adapters.hf.model_runs import (
    batch_of,
    checkpoint_by_hand,
    enable_checkpointing,
    gradients,
    loss_of,
    random_routes,
)

BATCH = batch_of(9, 6, 4)


def attributes(model):
    """Everything that hangs on every module's instance."""
    return {
        path: {k: v for k, v in module.__dict__.items() if not k.startswith("_hf")} | dict(module._forward_hooks)
        for path, module in model.named_modules()
    }


def same_attributes(before, after):
    return before.keys() == after.keys() and all(
        before[path].keys() == after[path].keys() and all(before[path][k] is after[path][k] for k in before[path])
        for path in before
    )


@pytest.mark.parametrize("family", sorted([*FAMILIES, *GROUPED]))
def test_attach_and_sessions_leave_the_model_as_it_was(family):
    model = tiny(family)
    model.model.train()
    model.lm_head.eval()
    model.activation_checkpointing_enable({"use_reentrant": False})
    before, state, rng = attributes(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with routed.replay(trace):
        assert not same_attributes(before, attributes(model)), "the check must be able to see an override"
        loss = loss_of(model, BATCH)
    loss.backward()
    model.lm_head.forward = lambda hidden: 1 / 0
    with pytest.raises(ZeroDivisionError), routed.replay(trace):
        loss_of(model, BATCH)
    del model.lm_head.forward
    with pytest.raises(BatchMismatchError), routed.replay(trace):
        model(input_ids=BATCH["input_ids"][:, 1:])
    assert same_attributes(before, attributes(model))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_forward_only_pass_between_updates_changes_nothing(checkpointing):
    def steps(*, with_extra_passes):
        model = tiny("qwen3_moe")
        enable_checkpointing(model, checkpointing)
        routed = hf.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            trace = random_routes(routed.spec, BATCH, step)
            with routed.replay(trace):
                loss = loss_of(model, BATCH)
                if with_extra_passes:
                    with torch.no_grad():
                        model(**BATCH)
            if with_extra_passes:
                other = batch_of(3, 5, seed=9)
                with torch.no_grad(), routed.replay(random_routes(routed.spec, other)):
                    model(**other)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    plain, disturbed = steps(with_extra_passes=False), steps(with_extra_passes=True)
    assert all(torch.equal(plain[name], disturbed[name]) for name in plain)


@pytest.mark.parametrize("order", ["AaBb", "ABab", "ABba"])
@pytest.mark.parametrize(
    ("use_reentrant", "backward_inside_other_session"),
    [
        (None, False),
        (True, True),
        (False, True),
        pytest.param(None, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_micro_batches_in_flight_keep_their_own_routes(order, use_reentrant, backward_inside_other_session):
    batches = {"A": batch_of(9, 6, seed=1), "B": batch_of(5, 8, seed=2)}

    def gradient_sum(run):
        model = tiny("deepseek_v3")
        enable_checkpointing(model, use_reentrant)
        routed = hf.attach(model)
        run(model, routed)
        return gradients(model)

    def one_by_one(model, routed):
        for name in [letter.upper() for letter in order if letter.islower()]:
            with routed.replay(random_routes(routed.spec, batches[name], ord(name))):
                loss_of(model, batches[name]).backward()

    def in_flight(model, routed):
        losses = {}
        for letter in order:
            if letter.isupper():
                with routed.replay(random_routes(routed.spec, batches[letter], ord(letter))):
                    losses[letter] = loss_of(model, batches[letter])
            elif backward_inside_other_session:
                other = batch_of(3, 3, seed=7)
                with routed.replay(random_routes(routed.spec, other)):
                    model(**other)
                    losses[letter.upper()].backward()
            else:
                losses[letter.upper()].backward()

    expected, seen = gradient_sum(one_by_one), gradient_sum(in_flight)
    assert all(torch.equal(seen[name], gradient) for name, gradient in expected.items())


def layers_by_hand(model, use_reentrant):
    checkpoint_by_hand(model, use_reentrant)
    return lambda batch: loss_of(model, batch)


def pairs_by_hand(model, use_reentrant):
    """A checkpoint around two layers, each of which has one of its own."""
    checkpoint_by_hand(model, use_reentrant)
    first, second = model.model.layers[0], model.model.layers[1]
    run, then = first.forward, second.forward
    first.forward = lambda h, **kw: checkpoint(lambda x: then(run(x, **kw), **kw), h, use_reentrant=use_reentrant)
    second.forward = lambda h, **kw: h
    return lambda batch: loss_of(model, batch)


def whole_model_by_hand(model, use_reentrant):
    anchor = torch.zeros(1, requires_grad=True)
    return lambda batch: checkpoint(lambda zero: loss_of(model, batch) + zero, anchor, use_reentrant=use_reentrant)


def composable(model, use_reentrant):
    for layer in model.model.layers:
        torch.distributed._composable.checkpoint(layer)
    return lambda batch: loss_of(model, batch)


@pytest.mark.parametrize(
    ("by_hand", "use_reentrant"),
    [
        *((form, kind) for form in (layers_by_hand, pairs_by_hand, whole_model_by_hand) for kind in (True, False)),
        (composable, False),
    ],
)
@pytest.mark.parametrize("inside_another", [False, True])
def test_a_checkpoint_called_by_hand_finds_its_routes(by_hand, use_reentrant, inside_another):
    """Two micro-batches in flight, whose backwards run when their sessions are closed, in the other order."""
    batches = [batch_of(9, 6, seed=1), batch_of(5, 8, seed=2)]

    def run(prepare):
        model = tiny("qwen3_moe").train()
        routed = hf.attach(model)
        loss_on = prepare(model)
        losses = []
        for number, batch in enumerate(batches):
            with routed.replay(random_routes(routed.spec, batch, number)):
                losses.append(loss_on(batch))
        with routed.record() if inside_another else nullcontext():
            for loss in reversed(losses):
                loss.backward()
            if inside_another:
                model(**BATCH)
        return gradients(model)

    expected = run(lambda model: lambda batch: loss_of(model, batch))
    seen = run(lambda model: by_hand(model, use_reentrant))
    assert all(torch.equal(seen[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_one_checkpoint_around_two_forwards_is_refused(use_reentrant):
    """Its recomputation would run the second on the routes of the first."""
    model = tiny("qwen3_moe").train()
    routed = hf.attach(model)
    anchor = torch.zeros(1, requires_grad=True)
    twice = lambda zero: loss_of(model, BATCH) + loss_of(model, BATCH) + zero  # noqa: E731
    with routed.replay(random_routes(routed.spec, BATCH)):
        with pytest.raises(ReplayError, match="holds two forwards of a model"):
            checkpoint(twice, anchor, use_reentrant=use_reentrant)
        loss_of(model, BATCH)


def test_a_bypassed_router_is_named():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    block = model.model.layers[2].mlp
    block.forward = lambda hidden: hidden
    with (
        pytest.raises(ReplayError, match=r"model\.layers\.2\.mlp\.gate selected 0 times"),
        routed.replay(random_routes(routed.spec, BATCH)),
    ):
        model(**BATCH)


def test_a_router_that_runs_twice_is_named():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    block = model.model.layers[0].mlp
    original = block.forward
    block.forward = lambda hidden: original(hidden) + original(hidden)
    with (
        pytest.raises(ReplayError, match=r"model\.layers\.0\.mlp\.gate selected 2 times"),
        routed.replay(random_routes(routed.spec, BATCH)),
    ):
        model(**BATCH)


@pytest.mark.parametrize("what", ["layers", "blocks"])
def test_layers_exchanged_after_attach_are_named(what):
    """Routes would follow the modules."""
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    first, second = model.model.layers[0], model.model.layers[2]
    if what == "layers":
        model.model.layers[0], model.model.layers[2] = second, first
    else:
        first.mlp, second.mlp = second.mlp, first.mlp
    with (
        pytest.raises(ReplayError, match=r"layers\.\d\.mlp\.gate stands where .* Attach again"),
        routed.replay(random_routes(routed.spec, BATCH)),
    ):
        model(**BATCH)
    again = hf.attach(model)
    with again.replay(random_routes(again.spec, BATCH)):
        model(**BATCH)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda routed: pickle.loads(pickle.dumps(routed))])
def test_what_was_attached_can_be_copied_with_its_model(copied):
    routed = hf.attach(tiny("qwen3_moe"))
    other = copied(routed)
    assert other.model is not routed.model
    trace = random_routes(routed.spec, BATCH)
    other.model.lm_head.weight.data.zero_()
    results = []
    for each in (routed, other):
        with each.replay(trace), each.record() as recording, torch.no_grad():
            results.append(each.model(**BATCH).logits)
        assert recording.trace().equals(trace)
    assert results[0].any()
    assert not results[1].any()


def test_a_session_without_a_forward_is_no_silent_no_op():
    routed = hf.attach(tiny("qwen3_moe"))
    with pytest.raises(ReplayError, match="nothing was replayed"), routed.replay(random_routes(routed.spec, BATCH)):
        pass
    with pytest.raises(ReplayError, match="nothing was recorded"), routed.record() as recording:
        recording.trace()


def test_replaying_twice_at_once_is_refused():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with routed.replay(trace):
        model(**BATCH)
        with pytest.raises(ReplayError, match="already replaying"), routed.replay(trace):
            pass
        model(**BATCH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {k: v[:, :-1] for k, v in b.items()}, "sequence 0 ends after 8 of 9 tokens"),
        (lambda b: {k: v[:2] for k, v in b.items()}, "the batch has 2 sequences and the trace has 3"),
        (lambda b: {k: v[[1, 0, 2]] for k, v in b.items()}, r"holds the sequences \[1, 0, 2\] of the trace"),
        (lambda b: {"input_ids": b["input_ids"]}, "sequence 1"),
        (lambda b: {**b, "input_ids": b["input_ids"].roll(1, dims=1)}, "sequence 0, position 0"),
        (lambda b: {"inputs_embeds": torch.zeros(3, 9, 32)}, "no input_ids"),
        (lambda b: {**b, "attention_mask": torch.zeros(3, 1, 9, 9)}, "attention_mask is"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(change, message):
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    with pytest.raises(BatchMismatchError, match=message), routed.replay(random_routes(routed.spec, BATCH)):
        model(**change(BATCH))


def test_recomputation_is_not_recorded_again(checkpointing):
    model = tiny("qwen3_moe")
    enable_checkpointing(model, checkpointing)
    routed = hf.attach(model)
    with routed.record() as recording:
        loss_of(model, BATCH).backward()
    with routed.record() as once, torch.no_grad():
        model(**BATCH)
    assert recording.trace().equals(once.trace())


def test_forwards_of_one_recording_are_joined_in_order():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    batches = [batch_of(4, 3, seed=1), batch_of(7, seed=2)]
    with routed.record() as both, torch.no_grad():
        for batch in batches:
            model(**batch)
    parts = []
    for batch in batches:
        with routed.record() as part, torch.no_grad():
            model(**batch)
        parts.append(part.trace())
    assert both.trace().equals(fr.concatenate(parts))


def test_a_part_of_the_model_called_alone_is_refused():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    with routed.replay(random_routes(routed.spec, BATCH)):
        model(**BATCH)
        with pytest.raises(ReplayError, match="ran outside a forward of Qwen3MoeModel"):
            model.model.layers[0].mlp(torch.zeros(1, 2, 32))


def test_sessions_may_close_in_any_order():
    model = tiny("qwen3_moe")
    before = attributes(model)
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    recording, replay = routed.record(), routed.replay(trace)
    recording.__enter__()
    replay.__enter__()
    with torch.no_grad():
        forced = model(**BATCH).logits
        recording.__exit__(None, None, None)
        assert torch.equal(model(**BATCH).logits, forced)
    replay.__exit__(None, None, None)
    assert same_attributes(before, attributes(model))


def test_what_a_user_sets_inside_a_session_stays():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    router = model.model.layers[0].mlp.gate
    with routed.record():
        model(**BATCH)
        mine = router.__class__.forward.__get__(router)
        router.forward = mine
    assert router.__dict__["forward"] is mine


def test_a_forward_that_continues_a_cache_is_not_replayed():
    """Even where its tokens are those of the trace: they stand at other positions."""
    model = tiny("qwen3_moe").eval()
    routed = hf.attach(model)
    batch = batch_of(4, seed=1)
    trace = random_routes(routed.spec, batch)
    with torch.no_grad():
        cache = model(input_ids=batch["input_ids"], use_cache=True).past_key_values
        with (
            pytest.raises(BatchMismatchError, match="continues a key-value cache of 4 positions; replay whole seq"),
            routed.replay(trace),
        ):
            model(input_ids=batch["input_ids"], past_key_values=cache, use_cache=True)


def test_decode_steps_of_another_batch_are_refused_of_a_compiled_model_too():
    """Where nobody sees the tensors of a cache, by their numbers."""
    model = tiny("qwen3_moe", experts="grouped_mm").eval()
    routed = hf.attach(model)
    first, second = batch_of(4, seed=1)["input_ids"], batch_of(6, seed=2)["input_ids"]
    compiled = torch.compile(model, backend="eager")
    with routed.record() as recording, torch.no_grad():
        cache = compiled(input_ids=first, use_cache=True).past_key_values
        compiled(input_ids=second, use_cache=True)
        compiled(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)
    with pytest.raises(ReplayError, match="1 sequences with 4 cached positions; the batch before it has 1 of 6"):
        recording.trace()


def test_a_model_that_does_not_repeat_itself_is_attached_by_its_routes():
    model = tiny("qwen3_moe")
    model.lm_head.register_forward_hook(lambda m, a, out: out + 0.01 * torch.randn_like(out))
    assert hf.attach(model).spec.num_experts == 8


def test_recorded_margins_are_the_gap_at_the_boundary():
    model = tiny("gpt_oss")  # selects on its logits, so the gap can be read off the router's output
    routed = hf.attach(model)
    logits = []
    handles = [
        model.get_submodule(p).register_forward_hook(lambda r, a, out: logits.append(out[0]))
        for p in routed.router_paths
    ]
    with routed.record(margins=True) as recording, torch.no_grad():
        model(**BATCH)
    for handle in handles:
        handle.remove()
    kept = BATCH["attention_mask"].bool().reshape(-1)
    ordered = torch.stack(logits).sort(-1, descending=True).values[:, kept]
    expected = (ordered[..., 2] - ordered[..., 3]).T.numpy()
    assert np.array_equal(recording.margins_NL(), expected)


@pytest.mark.parametrize("second", ["replay", "record"])
def test_sessions_of_a_model_that_was_attached_twice_are_refused_while_one_is_open(second):
    model = tiny("qwen3_moe")
    before = attributes(model)
    one, two = hf.attach(model), hf.attach(model)
    trace = random_routes(one.spec, BATCH)
    with one.replay(trace), torch.no_grad():
        expected = model(**BATCH).logits
        with (
            pytest.raises(ReplayError, match="attached twice"),
            two.record() if second == "record" else two.replay(trace),
        ):
            model(**BATCH)
        assert torch.equal(model(**BATCH).logits, expected)
    assert same_attributes(before, attributes(model))
    with two.replay(trace), torch.no_grad():
        assert torch.equal(model(**BATCH).logits, expected)
    assert same_attributes(before, attributes(model))


def test_a_backward_of_one_attachment_is_refused_in_a_session_of_the_other():
    model = tiny("qwen3_moe")
    enable_checkpointing(model, False)
    one, two = hf.attach(model), hf.attach(model)
    trace = random_routes(one.spec, BATCH)
    with one.replay(trace):
        loss = loss_of(model, BATCH)
    with two.record() as recording:
        with pytest.raises(ReplayError, match="attached twice"):
            loss.backward()
        loss_of(model, BATCH)
    assert recording.trace().num_rows == 19


def test_a_model_is_not_attached_and_no_part_of_it_copied_inside_a_session():
    """The routers of a copy would run those of the original."""
    model = tiny("qwen3_moe")
    with hf.attach(model).record():
        with pytest.raises(AttachError, match="a session is open"):
            hf.attach(model)
        for part in (model, model.model, model.model.layers[1], model.model.layers[1].mlp.gate):
            for copied in (copy.deepcopy, pickle.dumps):
                with pytest.raises(ReplayError, match="cannot be copied inside"):
                    copied(part)
        copy.deepcopy(model.lm_head)
    assert pickle.loads(pickle.dumps(model.model.layers[1].mlp.gate)).weight.shape == (8, 32)


@pytest.mark.parametrize("what", ["trunk", "router", "aux loss"])
def test_what_somebody_wraps_inside_a_session_still_runs_after_it(what):
    """Their wrapper keeps ours below it, for good; sessions and native forwards go on, each router once."""
    model = tiny("qwen3_moe")
    holder, name = {
        "trunk": (model.model, "forward"),
        "router": (model.model.layers[1].mlp.gate, "forward"),
        "aux loss": (model, "forward"),
    }[what]
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    counts = "replayed" if what == "aux loss" else "native"
    with torch.no_grad():
        native = model(**BATCH).logits
    with routed.replay(trace, counts=counts):
        expected = loss_of(model, BATCH)
        theirs = getattr(holder, name)
        setattr(holder, name, lambda *args, **kwargs: theirs(*args, **kwargs))
        assert torch.equal(loss_of(model, BATCH), expected)
    with torch.no_grad():
        assert torch.equal(model(**BATCH).logits, native)
    with routed.replay(trace, counts=counts), routed.record() as recording:
        loss_of(model, BATCH).backward()
    assert np.array_equal(recording.trace().expert_ids_NLK, trace.expert_ids_NLK)
    with torch.no_grad():
        assert torch.equal(model(**BATCH).logits, native)


def test_a_session_closed_in_the_middle_of_a_forward_is_named():
    model = tiny("qwen3_moe")
    recording = hf.attach(model).record()
    recording.__enter__()
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: recording.__exit__(None, None, None) or None)
    with pytest.raises(ReplayError, match="closed in the middle of a forward"):
        model(**BATCH)
    handle.remove()
    model(**BATCH)


def test_a_session_opened_in_the_middle_of_a_forward_is_named():
    model = tiny("qwen3_moe")
    recording = hf.attach(model).record()
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: recording.__enter__() and None)
    with pytest.raises(ReplayError, match="open sessions before a forward"):
        model(**BATCH)
    handle.remove()
    recording.__exit__(None, None, None)
    model(**BATCH)


def test_attaching_on_a_machine_of_two_gpus_warns_of_nothing(monkeypatch):
    """`fork_rng` does, once in a process, unless it is told whose numbers to keep."""
    kept = []
    monkeypatch.setattr(torch.random, "_fork_rng_warned_already", False, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="cuda": kept.append(device))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device="cuda": None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.attach(tiny("qwen3_moe"))
    assert kept == [0, 1] * 2, "where the model is made, and where it is attached"


def test_nothing_forks_the_random_state_without_naming_the_devices():
    """Where a model is loaded, or tried out by a trainer, it would warn just so."""
    found = []
    for path in Path(fr.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fork_rng"):
                found.append(path.name)
                assert node.args or "devices" in [keyword.arg for keyword in node.keywords], f"{path}:{node.lineno}"
    assert {"attach.py", "checks.py", "local_models.py"} <= set(found)


def test_rows_are_let_go_with_the_graph_that_recomputes_on_them(checkpointing, monkeypatch):
    """Not at some later time, when Python looks for cycles: they are on the GPU."""
    model = tiny("qwen3_moe")
    enable_checkpointing(model, checkpointing)
    routed = hf.attach(model)
    gathered = []
    gather = ReplayRows.gather
    monkeypatch.setattr(ReplayRows, "gather", lambda *args, **kwargs: note_weakly(gathered, gather(*args, **kwargs)))
    trace = random_routes(routed.spec, BATCH)
    gc.disable()
    try:
        with routed.replay(trace, telemetry=True):
            loss_of(model, BATCH).backward()
        assert [ids() for ids in gathered] == [None]
    finally:
        gc.enable()


def note_weakly(gathered, rows):
    gathered.append(weakref.ref(rows.ids_LRK))
    return rows


def test_a_recording_keeps_of_margins_one_number_for_each_row_and_layer():
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    with routed.record(margins=True) as recording, torch.no_grad():
        model(**BATCH, use_cache=False)
    [[kept]] = recording._passes
    tensors = {name: value for name, value in vars(kept).items() if isinstance(value, torch.Tensor)}
    assert sorted(tensors) == ["ids_LRK", "margin_LR"]
    slots = BATCH["input_ids"].numel() * routed.spec.num_layers
    assert tensors["margin_LR"].untyped_storage().nbytes() == 4 * slots
    assert tensors["ids_LRK"].untyped_storage().nbytes() == routed.spec.top_k * slots
