"""Routes in verl's data protocol on plain tensors: read, written, refused. These tests need no verl."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foreroute.errors import BatchMismatchError, CaptureError, ReplayError
from foreroute.trace import DecisionStream, RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.trainers.verl import routed_experts, trace_of
from foreroute.trainers.verl.packed_batch import PackedBatch, require_routed
from tests.trainers.verl.verl_batches import (
    PROMPT,
    SPEC,
    nested,
    padded,
    require_told,
    sequences,
    telling_routes,
    unpadded,
)

LAYOUTS = {"padded": padded, "unpadded": unpadded}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return LAYOUTS[request.param]


def test_routes_come_out_where_they_went_in_and_go_back_as_they_were(layout):
    pairs = sequences(5)
    batch = layout(pairs)
    trace = trace_of(batch, model=SPEC, weight_version=3)
    require_told(trace, pairs)
    assert trace.versions == (3,)
    written = routed_experts(trace, batch, num_hidden_layers=3)
    assert written.dtype == torch.int16
    given = batch["routed_experts"]
    if written.is_nested:
        assert torch.equal(written.offsets(), given.offsets())
        written, given = written.values(), given.values()
    assert torch.equal(written, given)


def test_decisions_that_the_field_cannot_hold_are_refused():
    """The control: without them, the same trace goes in."""
    batch = padded(sequences(3))
    trace = trace_of(batch, model=SPEC)
    nothing = DecisionStream.absent(2**31 - 1, trace.num_rows, layers=[RoutedLayer(0)])
    full = trace.with_stream("indexer", nothing)
    with pytest.raises(CaptureError, match="choices of indexers, and verl has no field"):
        routed_experts(full, batch)
    routed_experts(full.without_streams("indexer"), batch)


def test_a_data_proto_and_routes_of_routed_layers_alone_are_read():
    pairs = sequences(3)
    batch = padded(pairs)
    batch["routed_experts"] = batch["routed_experts"][:, :, 1:]
    proto = SimpleNamespace(batch=batch, non_tensor_batch={}, meta_info={})
    require_told(trace_of(proto, model=SPEC), pairs)


def test_a_response_that_verl_cut_keeps_the_route_of_its_last_token():
    """The engine went on sampling, so that a route of the last token that verl keeps was computed."""
    pairs = sequences(2)
    trace = trace_of(padded(pairs, lambda tokens: telling_routes(tokens, rows=len(tokens))), model=SPEC)
    assert trace.valid_N.all()
    assert np.array_equal(trace.expert_ids_NLK[-1], telling_routes(np.concatenate(pairs[-1]), rows=99)[-1, 1:])


def with_masks(batch, masks):
    """The batch with these response masks, in its layout."""
    rows = nested([np.array(mask) for mask in masks])
    if not batch["response_mask"].is_nested:
        rows = torch.nested.to_padded_tensor(rows, 0, batch["response_mask"].shape)
    return {**batch, "response_mask": rows}


def trained(batch):
    """Of each response, which tokens are trained on."""
    packed = PackedBatch(batch)
    mask_N, is_response_N = packed.trained_N, packed.index_N >= 0
    packed.require_true()
    return [mask_N[(packed.number_N == s) & is_response_N].tolist() for s in range(len(packed.offsets) - 1)]


def test_rows_that_no_trained_token_depends_on_may_be_absent(layout):
    """A tool answers last: its three tokens are not trained on, and the engine has not seen them."""
    pairs = [(np.arange(1, 5), np.arange(10, 16)), (np.arange(5, 9), np.arange(20, 23))]
    batch = layout(pairs, lambda tokens: telling_routes(tokens, rows=len(tokens) - 4 if len(tokens) > 7 else None))
    masks = [[1, 1, 1, 0, 0, 0], [1, 1, 1]]
    batch = with_masks(batch, masks)
    trace = trace_of(batch, model=SPEC)
    assert trained(batch) == [[bool(x) for x in mask] for mask in masks]
    require_routed(trace, batch)
    with pytest.raises(
        ReplayError, match=r"sequence 0 .* no route at position 6, and trains on tokens up to position 7"
    ):
        require_routed(trace, with_masks(batch, [[1, 1, 1, 1, 0, 0], masks[1]]))


def test_a_sequence_that_fills_the_batch_up_needs_no_routes():
    """As verl's upsample_batch_to_divisible_size makes it: end tokens, nothing trained, routes of zeros."""
    pairs = [*sequences(1), (np.full(5, 2), np.full(1, 2))]
    batch = unpadded(pairs, lambda tokens: telling_routes(tokens, rows=0 if tokens[0] == 2 else None))
    batch["response_mask"] = nested([np.ones_like(pairs[0][1]), np.zeros(1, np.int64)])
    trace = trace_of(batch, model=SPEC)
    assert not trace.select([1]).valid_N.any()
    require_routed(trace, batch)


def test_each_token_of_a_response_has_its_entry_in_a_field_of_responses(layout):
    pairs = sequences(4)
    batch = layout(pairs)
    packed = PackedBatch({**batch, "tokens again": batch["responses"]})
    is_response_N = packed.index_N >= 0
    assert torch.equal(packed.gather_field("tokens again")[is_response_N], packed.tokens_N[is_response_N])
    assert is_response_N.tolist() == [r for prompt, response in pairs for r in [0] * len(prompt) + [1] * len(response)]
    assert packed.tokens_N[packed.is_first_N].tolist() == [prompt[0] for prompt, _ in pairs]


def _put(place, value):
    def spoil(batch):
        batch["routed_experts"][place] = value

    return spoil


def _changed(change):
    return lambda batch: batch.update(routed_experts=change(batch["routed_experts"]))


def _shorter(routes):
    first, *others = routes.unbind()
    return torch.nested.as_nested_tensor([first[:-1], *others], layout=torch.jagged)


@pytest.mark.parametrize(
    ("make", "spoil", "message"),
    [
        (
            padded,
            lambda batch: batch.pop("routed_experts"),
            "has no 'routed_experts'.*enable_rollout_routing_replay",
        ),
        (padded, lambda batch: batch.pop("attention_mask"), "has no 'attention_mask'"),
        (
            padded,
            _changed(lambda _: unpadded(sequences(3))["routed_experts"]),
            "input_ids are padded and routed_experts are unpadded",
        ),
        (padded, _put((0, PROMPT - 1, 1), 5), "an expert twice"),
        (padded, _put((0, PROMPT - 1, 1, 0), 64), "expected 0 to 63"),
        (padded, _put((0, PROMPT - 1, 0), torch.tensor([3, 4])), "which the spec says is dense"),
        (
            padded,
            _changed(lambda routes: routes.repeat(1, 1, 2, 1)),
            "has routes in decoder layer 4, which the spec says is dense",
        ),
        (padded, _changed(torch.Tensor.float), "dtype float32; expected integers"),
        (unpadded, _changed(_shorter), "sequence 0 has .* rows of routed_experts for .* tokens"),
    ],
)
def test_what_cannot_be_true_is_refused(make, spoil, message):
    batch = make(sequences(3))
    trace_of(batch, model=SPEC)
    spoil(batch)
    with pytest.raises(CaptureError, match=message):
        trace_of(batch, model=SPEC)


def test_top_1_routes_to_expert_0_are_refused_where_they_mean_absent_as_well():
    top_1 = RoutingSpec(64, 1, (RoutedLayer(0),))
    ids = nested([np.array([1, 2, 3, 4])])
    rows = np.array([5, 6, 7, 0], np.int16).reshape(4, 1, 1)
    assert trace_of({"input_ids": ids, "routed_experts": nested([rows])}, model=top_1).valid_N.tolist() == [1, 1, 1, 0]
    rows[1] = 0
    with pytest.raises(CaptureError, match="row of zeros at position 1"):
        trace_of({"input_ids": ids, "routed_experts": nested([rows])}, model=top_1)


def _of_zeros(batch, sequence, rows):
    values = batch["routed_experts"]
    if values.is_nested:
        parts = list(values.unbind())
        parts[sequence][rows] = 0
        batch["routed_experts"] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    else:
        first = int(batch["attention_mask"][sequence].argmax())
        values[sequence, first:][rows] = 0


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 3)])
def test_a_row_of_zeros_before_a_routed_one_is_refused(layout, rows):
    batch = layout([(np.arange(1, 5), np.arange(10, 16))])
    _of_zeros(batch, 0, rows)
    with pytest.raises(CaptureError, match=rf"sequence 0 .*no route at position {rows.start}, .*only at the end"):
        trace_of(batch, model=SPEC)


def test_a_batch_without_any_route_is_refused_unless_it_trains_on_nothing(layout):
    batch = layout(sequences(2), lambda tokens: telling_routes(tokens, rows=0))
    with pytest.raises(CaptureError, match=r"nothing but zeros.*enable_rollout_routing_replay"):
        trace_of(batch, model=SPEC)
    with pytest.raises(CaptureError, match="nothing but zeros"):
        trace_of({name: batch[name] for name in batch if name != "response_mask"}, model=SPEC)
    trace = trace_of({**batch, "response_mask": batch["response_mask"] * 0}, model=SPEC)
    assert len(trace) == 2
    assert not trace.valid_N.any()


@pytest.mark.parametrize("number", [0, 2], ids=["hole", "other"])
def test_masks_with_holes_or_other_numbers_are_refused(number):
    batch = padded(sequences(3))
    batch["response_mask"] = batch["response_mask"].clone()
    trace = trace_of(batch, model=SPEC)
    batch["attention_mask"][0, PROMPT] = number
    for use in (
        lambda: trace_of(batch, model=SPEC),
        lambda: routed_experts(trace, batch),
        lambda: require_routed(trace, batch),
    ):
        with pytest.raises(CaptureError, match="attention_mask"):
            use()
    with pytest.raises(CaptureError, match="attention_mask is float32"):
        trace_of({**batch, "attention_mask": batch["attention_mask"] * 0.5}, model=SPEC)


@pytest.mark.parametrize("number", [2, -1, 0.5])
def test_a_response_mask_is_of_zeros_and_ones(layout, number):
    batch = layout(sequences(3))
    batch["response_mask"] = batch["response_mask"] * number
    with pytest.raises(CaptureError, match="response_mask"):
        trained(batch)


def test_fields_of_another_batch_are_refused(layout):
    batch, other = layout(sequences(3)), layout(sequences(2))
    trace = trace_of(batch, model=SPEC)
    with pytest.raises(CaptureError, match="2 rows for 3 responses"):
        trained({**batch, "response_mask": other["response_mask"]})
    with pytest.raises(BatchMismatchError, match="the trace has 3 sequences, the batch 2"):
        require_routed(trace, other)
    short = {**batch, "response_mask": nested([np.ones(1, np.int64)] * 3)}
    with pytest.raises(CaptureError, match="that their sequences, and every field of responses, have room for"):
        trained(short)


@pytest.mark.parametrize("batch", [None, 5, "batch", [], object(), {}, {"input_ids": [1]}, SimpleNamespace(batch=None)])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(CaptureError, match="batch of verl"):
        trace_of(batch, model=SPEC)
    with pytest.raises(CaptureError, match="batch of verl"):
        PackedBatch(batch)


def test_a_gap_is_not_written_as_zeros(layout):
    pairs = sequences(2)
    batch = layout(pairs)
    trace = trace_of(batch, model=SPEC)
    valid = trace.valid_N.copy()
    valid[1] = False
    gap = dataclasses.replace(trace, valid_N=valid)
    with pytest.raises(CaptureError, match="sequence 0 has no route at position 1, and one behind it"):
        routed_experts(gap, batch)
    top_1 = RoutingSpec(64, 1, (RoutedLayer(0),))
    tokens = [np.arange(1, 5)]
    routes = RoutingTrace.from_sequences(top_1, tokens, [np.array([3, 0, 2]).reshape(3, 1, 1)])
    with pytest.raises(CaptureError, match="sequence 0 goes to expert 0 in all layers at position 1"):
        routed_experts(routes, {"input_ids": nested(tokens)})


def test_a_trace_is_not_written_beside_other_tokens():
    pairs = sequences(3)
    trace = trace_of(padded(pairs), model=SPEC)
    with pytest.raises(BatchMismatchError, match="in another order"):
        routed_experts(trace, padded(pairs[::-1]))
