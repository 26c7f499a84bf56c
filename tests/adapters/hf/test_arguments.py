"""What a session is handed: a value of the wrong kind is refused by name, before anything of the model is touched."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import (
    AttachError,
    BatchMismatchError,
    ConfigError,
    ForerouteError,
    ReplayError,
    StaleTraceError,
    TraceError,
)
from foreroute.testing.models import tiny
from foreroute.trace import RoutingTrace
from tests.adapters.hf.model_runs import batch_of, random_routes

BATCH = batch_of(9, 6, 4)


@pytest.fixture(scope="module")
def model():
    return tiny("qwen3_moe").eval()


@pytest.fixture(scope="module")
def routed(model):
    return hf.attach(model)


@pytest.fixture(scope="module")
def trace(routed):
    return random_routes(routed.spec, BATCH).with_weight_version(1)


def replayed(routed, trace, batch=BATCH, **options):
    with routed.replay(trace, **options) as session, torch.no_grad():
        routed.model(**batch)
    return session


def recorded(routed, batch=BATCH, **options):
    with routed.record(**options) as recording, torch.no_grad():
        routed.model(**batch)
    return recording.trace()


@pytest.mark.parametrize(
    "given",
    [True, np.True_, 7.0, 1.0, np.float32(1), "1", b"1", "", [], {}, [None], ["1"], [1.0], [True], [[1]], {1: 2},
     torch.tensor(1.0), np.array([1.0]), object(), -2, [-2], float("nan"), iter([1]), range(-3, 0), range(0)],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_expected_versions_that_are_no_whole_numbers_are_refused(routed, trace, given):
    with pytest.raises(ConfigError, match=r"weight_version is .*expected a whole number"):
        replayed(routed, trace, weight_version=given)


@pytest.mark.parametrize(
    "given", [1, np.int64(1), np.array(1), torch.tensor(1), [1], (0, 1), {1}, range(3), np.array([1]), range(10**15)],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_expected_versions_may_be_one_or_several(routed, trace, given):
    assert replayed(routed, trace, weight_version=given).num_forwards == 1


def test_the_largest_version_is_one_that_a_trace_can_state(routed, trace):
    largest = 2**31 - 1
    stated = recorded(routed, weight_version=largest)
    assert stated.versions == (largest,)
    assert replayed(routed, stated, weight_version=largest).num_forwards == 1


def test_every_routed_row_is_of_an_accepted_version(routed, trace):
    """As of a rollout that went on under new weights; one fresh row does not vouch for the others."""
    mixed = replace(trace, weight_versions_N=np.where(np.arange(trace.num_rows) < 5, 1, 2).astype(np.int32))
    assert mixed.versions == (1, 2)
    for given in (1, 2, [2, 3], range(2, 4)):
        with pytest.raises(StaleTraceError, match=r"weight versions \[1, 2\], expected only"):
            replayed(routed, mixed, weight_version=given)
    assert replayed(routed, mixed, weight_version=[1, 2]).num_forwards == 1


def test_a_trace_without_routes_is_of_no_version(routed, trace):
    bare = RoutingTrace.unrouted(trace.spec, [trace.tokens(s) for s in range(len(trace))])
    with pytest.raises(StaleTraceError, match=r"weight versions \[\], expected only 1 "):
        replayed(routed, bare, weight_version=1)


def test_a_range_of_versions_does_not_let_pass_what_states_none(routed, trace):
    """`range(step - 2, step + 1)` reaches below 0 in the first steps."""
    unstated = trace.with_weight_version(-1)
    with pytest.raises(StaleTraceError, match=r"versions \[-1\], expected only 0 "):
        replayed(routed, unstated, weight_version=range(-2, 1))
    replayed(routed, unstated, weight_version=-1)


def test_stale_versions_are_told_briefly_however_many_are_accepted(routed, trace):
    with pytest.raises(StaleTraceError, match="expected only 10, 11, 12, 13, 14, 15, 16, 17 and 92 more"):
        replayed(routed, trace, weight_version=list(range(10, 110)))


@pytest.mark.parametrize(
    "given", [True, 1.5, "1", None, [1], object(), -2, 2**31, float("nan")], ids=lambda g: type(g).__name__
)
def test_a_version_to_stamp_that_is_no_whole_number_is_refused_before_the_forward(routed, given):
    with pytest.raises(ConfigError, match=r"weight_version is .*expected a whole number"):
        routed.record(weight_version=given).__enter__()


@pytest.mark.parametrize(
    "given", [None, 1, "yes", np.array([1, 2]), torch.tensor([1, 0]), object()], ids=lambda g: type(g).__name__
)
@pytest.mark.parametrize("name", ["telemetry", "gate_weights", "margins"])
def test_a_switch_is_true_or_false(routed, trace, name, given):
    opened = [routed.record] if name == "margins" else [lambda **o: routed.replay(trace, **o)]
    opened += [routed.record] if name == "gate_weights" else []
    for begin in opened:
        with pytest.raises(ConfigError, match=f"{name} is .*expected True or False"):
            begin(**{name: given}).__enter__()


def test_a_switch_may_be_of_numpy(routed, trace):
    assert replayed(routed, trace, telemetry=np.True_, gate_weights=np.False_).agreement() is not None
    assert recorded(routed, gate_weights=np.True_).gate_weights_NLK is not None


@pytest.mark.parametrize("given", [None, 0, [], {}, "x", "native ", np.array("native"), True, b"error"], ids=repr)
def test_a_choice_is_one_of_its_words(routed, trace, given):
    for name in ("missing", "counts"):
        with pytest.raises(ConfigError, match=f"{name} is .*expected one of"):
            routed.replay(trace, **{name: given}).__enter__()


@pytest.mark.parametrize("kind", ["none", "text", "list", "array", "tensor", "class", "routed model", "spec"])
def test_what_is_replayed_is_a_trace(routed, trace, kind):
    given = {
        "none": None,
        "text": "rollout.safetensors",
        "list": [trace],
        "array": trace.expert_ids_NLK,
        "tensor": torch.zeros(3),
        "class": type(trace),
        "routed model": routed,
        "spec": trace.spec,
    }[kind]
    with pytest.raises(TraceError, match="expected a RoutingTrace"):
        routed.replay(given).__enter__()


def test_what_is_attached_is_a_module(model, routed):
    for given in (None, 1, "Qwen/Qwen3-30B-A3B", [model], type(model), routed, object()):
        with pytest.raises(AttachError, match=r"expected a model, a torch\.nn\.Module"):
            hf.attach(given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": BATCH["attention_mask"] * 0.5}, "attention_mask holds 0.5"),
        ({"attention_mask": BATCH["attention_mask"] * 2}, "attention_mask holds 2"),
        ({"attention_mask": -BATCH["attention_mask"]}, "attention_mask holds -1"),
        ({"attention_mask": BATCH["attention_mask"] * float("nan")}, "attention_mask holds nan"),
        ({"attention_mask": BATCH["attention_mask"].tolist()}, "attention_mask is a list"),
        ({"input_ids": BATCH["input_ids"].float()}, r"input_ids are float32 of shape \(3, 9\)"),
        ({"input_ids": BATCH["input_ids"].bool()}, r"input_ids are bool of shape \(3, 9\)"),
        ({"input_ids": BATCH["input_ids"][0]}, r"input_ids are int64 of shape \(9,\)"),
        ({"past_key_values": "cache"}, "past_key_values is a str"),
        ({"cu_seq_lens_q": [0, 27]}, "cu_seq_lens_q is a list"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 27.0])}, "cu_seq_lens_q are float32"),
        ({"cu_seq_lens_q": torch.tensor([False, True])}, r"cu_seq_lens_q are bool of shape \(2,\)"),
        ({"cu_seq_lens_q": torch.tensor([[0, 27]])}, r"cu_seq_lens_q are int64 of shape \(1, 2\)"),
        ({"attention_mask": BATCH["attention_mask"][:2]}, r"attention_mask is \(2, 9\)"),
        ({"attention_mask": BATCH["attention_mask"][:, 1:]}, r"attention_mask is \(3, 8\)"),
        ({"attention_mask": BATCH["attention_mask"][0]}, r"attention_mask is \(9,\)"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(3, 9, 32)}, "the forward got no input_ids"),
    ],
)
def test_batches_of_wrong_values_are_refused_in_replay_and_in_recordings(routed, trace, change, message):
    for session in (routed.replay(trace), routed.record()):
        with pytest.raises(BatchMismatchError, match=message), session, torch.no_grad():
            routed.model(**{**BATCH, **change})


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_zeros_and_ones_may_have_any_type(routed, trace, dtype):
    batch = {**BATCH, "attention_mask": BATCH["attention_mask"].to(dtype)}
    assert replayed(routed, trace, batch).num_forwards == 1
    assert recorded(routed, batch).lengths.tolist() == [9, 6, 4]


def test_a_session_is_opened_once(routed, trace):
    for session in (routed.replay(trace), routed.record()):
        with session, torch.no_grad():
            routed.model(**BATCH)
        with pytest.raises(ReplayError, match="opened once"):
            session.__enter__()
        session.__exit__(None, None, None)  # closing twice changes nothing


@pytest.mark.parametrize("how", ["closed", "dropped", "thrown into"])
def test_a_session_in_a_generator_goes_with_it(model, routed, trace, how):
    def batches():
        with routed.replay(trace):
            model(**BATCH)
            yield 1

    before = {path: set(vars(module)) for path, module in model.named_modules()}
    running = batches()
    next(running)
    if how == "closed":
        running.close()
    elif how == "thrown into":
        with pytest.raises(KeyError):
            running.throw(KeyError("mine"))
    else:
        del running
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before


def test_no_hostile_value_leaves_a_trace_on_the_model(model, routed, trace):
    before = {path: set(vars(module)) for path, module in model.named_modules()}
    for options in ({"missing": 1}, {"weight_version": "1"}, {"telemetry": "yes"}, {"counts": []}):
        with pytest.raises(ForerouteError):
            routed.replay(trace, **options).__enter__()
    assert {path: set(vars(module)) for path, module in model.named_modules()} == before
    replayed(routed, trace)


@pytest.mark.parametrize("given", [range(2, 10**12 + 1), range(10**12, 1, -1)], ids=["up", "down"])
def test_a_long_range_of_versions_is_told_by_its_ends(routed, trace, given):
    with pytest.raises(StaleTraceError, match="expected only those from 2 to 1000000000000 "):
        replayed(routed, trace, weight_version=given)
