"""Routes in verl's data protocol on plain tensors: read, written, refused. These tests need no verl."""

import dataclasses
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foreroute.errors import BatchMismatchError, CaptureError, ConfigError, ReplayError
from foreroute.trace import DecisionStream, RoutedLayer, RoutingSpec
from foreroute.trainers.verl import routed_experts, trace_of
from foreroute.trainers.verl.packed_batch import PackedBatch, PackedRoutes, require_routed
from foreroute.trainers.verl.settings import replay_of
from tests.trainers.verl.verl_batches import PROMPT, SPEC, nested, padded, sequences, telling_routes, unpadded


def between(pairs, routes=telling_routes):
    """As verl's workers are given it: tokens and routes without padding, all else with it."""
    flat = unpadded(pairs, routes)
    return {**padded(pairs, routes), "input_ids": flat["input_ids"], "routed_experts": flat["routed_experts"]}


def require_told(trace, pairs):
    """Every row of the trace is that of its token, its position and its sequence, and the last one is absent."""
    assert len(trace) == len(pairs)
    for s, pair in enumerate(pairs):
        tokens = np.concatenate(pair)
        assert np.array_equal(trace.tokens(s), tokens)
        rows = slice(trace.offsets[s], trace.offsets[s + 1])
        assert trace.valid_N[rows].tolist() == [True] * (len(tokens) - 1) + [False]
        assert np.array_equal(trace.expert_ids_NLK[rows][:-1], telling_routes(tokens)[:, 1:])


@pytest.mark.parametrize("layout", [padded, unpadded, between])
def test_routes_come_out_where_they_went_in_and_go_back_as_they_were_where_the_field_can_hold_them(layout):
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
    nothing = DecisionStream.absent(2**31 - 1, trace.num_rows, layers=[RoutedLayer(0)])
    gap = dataclasses.replace(trace, valid_N=trace.valid_N & (np.arange(trace.num_rows) != 1))
    for wrong, message in (
        (trace.with_stream("indexer", nothing), r"indexers, and.*no field"),
        (gap, r"sequence 0 has no.*position 1, .*behind"),
    ):
        with pytest.raises(CaptureError, match=message):
            routed_experts(wrong, batch)
    with pytest.raises(BatchMismatchError, match="another order"):
        routed_experts(trace, layout(pairs[::-1]))
    with pytest.raises(BatchMismatchError, match=r"trace.*5 sequences.*2"):
        require_routed(trace, unpadded(sequences(2)))


def test_a_data_proto_and_routes_of_routed_layers_alone_are_read():
    """Rows have the version of the weights where a single one sampled the sequence."""
    pairs = sequences(3)
    batch = padded(pairs)
    batch["routed_experts"] = batch["routed_experts"][:, :, 1:]
    spans = {"min_global_steps": np.array([3, 3, 5]), "max_global_steps": np.array([3, 4, 5])}
    trace = trace_of(SimpleNamespace(batch=batch, non_tensor_batch=spans, meta_info={}), model=SPEC)
    require_told(trace, pairs)
    wanted = np.repeat([3, -1, 5], trace.lengths)
    assert np.array_equal(trace.weight_versions_N, np.where(trace.valid_N, wanted, -1))


@pytest.mark.parametrize("layout", [unpadded, between])
@pytest.mark.parametrize("seed", range(12))
def test_tokens_entries_and_rows_that_trained_tokens_depend_on_are_those_of_a_loop(layout, seed):
    """Sequences that verl cut have a route of their last token too; those that fill a batch up have none."""
    rng = np.random.default_rng(seed)
    pairs = sequences(int(rng.integers(1, 5)), seed)
    masks = [rng.integers(0, 2, len(response)) for _, response in pairs]
    rows = [int(rng.choice([n, n - 1, n - 2, n - 3])) for n in (sum(map(len, pair)) for pair in pairs)]
    masks[0][:], rows[0] = (masks[0], rows[0]) if seed % 2 else (0, 0)
    num_rows = {int(prompt[0]): kept for (prompt, _), kept in zip(pairs, rows, strict=True)}

    def given(tokens):
        routed = telling_routes(tokens, rows=num_rows[int(tokens[0])])
        return np.concatenate([routed, np.full((len(tokens) - len(routed), 3, 2), rng.choice([0, -1]))])

    batch, trained = layout(pairs, given), nested(masks)
    if not batch["response_mask"].is_nested:
        trained = torch.nested.to_padded_tensor(trained, 0, batch["response_mask"].shape)
    batch["response_mask"] = trained
    packed = PackedBatch({**batch, "tokens again": batch["responses"]})
    expected = [
        (s, p, token, p >= len(prompt), p >= len(prompt) and bool(masks[s][p - len(prompt)]))
        for s, (prompt, response) in enumerate(pairs)
        for p, token in enumerate([*prompt, *response])
    ]
    of_response, found = packed.index_N >= 0, (packed.number_N, packed.is_first_N, packed.tokens_N, packed.trained_N)
    assert [each.tolist() for each in found] == [
        [s for s, *_ in expected],
        [p == 0 for _, p, *_ in expected],
        [token for _, _, token, *_ in expected],
        [trained for *_, trained in expected],
    ]
    assert of_response.tolist() == [each[3] for each in expected]
    assert torch.equal(packed.gather_field("tokens again")[of_response], packed.tokens_N[of_response])
    packed.require_true()
    if not any(rows):  # refused as a whole, where anything is trained on
        return
    trace = trace_of(batch, model=SPEC)
    assert trace.valid_N.tolist() == [p < rows[s] for s, p, *_ in expected]
    last = [
        max([p for s, p, *_, trained in expected if trained and s == number], default=0) for number in range(len(pairs))
    ]
    missing = [(s, rows[s], last[s]) for s in range(len(pairs)) if rows[s] < last[s]]
    said = r"sequence {} .*no route.*position {}, .*position {}"
    refused = pytest.raises(ReplayError, match=said.format(*missing[0])) if missing else nullcontext()
    with refused:
        require_routed(trace, batch)
    with refused:
        assert on_device(batch).equals(trace)


def decode(batch):
    trace = trace_of(batch, model=SPEC)
    require_routed(trace, batch)
    return trace


def on_device(batch):
    """The routes as forwards replay them, of a batch whose tokens have no padding."""
    return PackedRoutes(PackedBatch(batch), SPEC, lambda: decode(batch)).trace()


def at(place, value):
    """Writes it into the routes of the first sequence of a batch."""

    def spoil(batch):
        field = batch["routed_experts"] = batch["routed_experts"].clone()
        if field.is_nested:
            first = field.values()[: int(field.offsets()[1])]
        else:
            first = field[0, int(batch["attention_mask"][0].argmax()) :]
        first[place] = value

    return spoil


def changed(name, change):
    return lambda batch: batch.update({name: change(batch[name])})


LONG = nested([[1] * 20] * 3)
EVERY = (padded, unpadded, between)
REFUSED = [
    (EVERY, lambda batch: batch.pop("routed_experts"), "has no 'routed_experts'.*enable_rollout_routing_replay"),
    (EVERY, at((0, 1), 5), "an expert twice"),
    (EVERY[1:], at(0, -1), "sequence 0 .* no route at position 0, and trains"),
    (EVERY, at((0, 1, 0), 64), "expected 0 to 63"),
    ([padded], at((0, 0), torch.tensor([3, 4])), "which the spec says is dense"),
    (EVERY, at(slice(1, 3), 0), "sequence 0 .*no route at position 1, .*only at the end"),
    (EVERY, changed("routed_experts", lambda field: field * 0), r"nothing but zeros.*enable_rollout_routing_replay"),
    (EVERY, changed("routed_experts", lambda field: field.float()), "dtype float32; expected integers"),
    (EVERY[1:], changed("response_mask", lambda mask: mask * 2), "response_mask"),
    ([unpadded], lambda batch: batch.update(responses=LONG, response_mask=LONG), "that their sequences, .* have room"),
    ([padded], lambda batch: batch.pop("attention_mask"), "has no 'attention_mask'"),
    ([padded, between], lambda batch: batch["attention_mask"].__setitem__((0, PROMPT), 0), "attention_mask"),  # a hole
    ([padded], lambda batch: batch["attention_mask"].__setitem__((0, PROMPT), 2), "attention_mask"),
]


@pytest.mark.parametrize(("make", "spoil", "message"), [(make, *case) for makes, *case in REFUSED for make in makes])
def test_what_cannot_be_true_is_refused_on_the_host_and_alike_on_the_device(make, spoil, message):
    batch = make(sequences(3))
    spoil(batch)
    for read in [partial(trace_of, model=SPEC)] if make is padded else [decode, on_device]:
        with pytest.raises((CaptureError, ReplayError), match=message):
            read(batch)


def test_top_1_routes_to_expert_0_are_refused_where_they_mean_absent_as_well():
    tokens = [np.arange(1, 5)]
    rows, top_1 = np.array([5, 6, 7, 0], np.int16).reshape(4, 1, 1), RoutingSpec(64, 1, (RoutedLayer(0),))
    read = lambda: trace_of({"input_ids": nested(tokens), "routed_experts": nested([rows])}, model=top_1)  # noqa: E731
    assert read().valid_N.tolist() == [1, 1, 1, 0]
    rows[1] = 0
    with pytest.raises(CaptureError, match=r"zeros.*position 1"):
        read()


def test_the_mode_is_read_from_a_section_and_what_is_none_is_refused():
    for stated in ({"mode": "R3"}, SimpleNamespace(mode="R3")):
        assert replay_of(SimpleNamespace(router_replay=stated)) == "R3"
    assert replay_of(SimpleNamespace(router_replay=None)) == "disabled"
    for stated in ("R3", {"mode": "r3"}, {"mode": "R3", "record_file": "routes.pt"}):
        with pytest.raises(ConfigError, match=r"router_replay|record_file"):
            replay_of(SimpleNamespace(router_replay=stated))
