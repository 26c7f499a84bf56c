"""Where the sequences of a batch are; the oracle of packed rows is one forward per sequence."""

import numpy as np
import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import BatchMismatchError, LayoutError, ReplayError
from foreroute.layout import pack, pad
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, experts_log, packed, sequences_of, with_routes

ALONE = batch_of(5, 1, 4, 6, 3, 3)
SEQUENCES = sequences_of(ALONE)
ONE_ROW, TWO_ROWS = [[0, 1, 2, 3, 4, 5]], [[0, 1, 4, 5], [3, 2, 1, 1]]
"""The sequences of each row; in both rows of two they add up to 12 tokens."""
PACKED, SWAPPED = packed(SEQUENCES, ONE_ROW), packed(SEQUENCES, [[1, 0, 2, 3, 4, 5]])
OFFSETS = {"cu_seq_lens_q": torch.tensor([0, *np.cumsum([len(each) for each in SEQUENCES])])}


def logits_alone(model, routed, trace, order):
    """[tokens, V], sequence by sequence, each replayed in a forward of its own."""
    parts = []
    for place, s in enumerate(order):
        tokens = torch.from_numpy(SEQUENCES[s])[None]
        with routed.replay(trace.select([place])):
            parts.append(model(input_ids=tokens, use_cache=False).logits[0])
    return torch.cat(parts)


@pytest.mark.shows("Hugging Face", "packed batches")
@pytest.mark.parametrize(("family", "rows"), [("qwen3_moe", ONE_ROW), ("deepseek_v3", TWO_ROWS)])
def test_a_packed_batch_replays_each_sequence_as_if_alone(family, rows):
    model, routed, trace = with_routes(ALONE, family)
    order = [s for row in rows for s in row]
    trace = trace.select(order)
    with torch.no_grad(), experts_log(model) as log:
        expected = logits_alone(model, routed, trace, order)
        log.clear()
        with routed.replay(trace), routed.record() as recording:
            seen = model(**packed(SEQUENCES, rows), use_cache=False).logits.reshape(-1, expected.shape[-1])
    for layer, (_, ids) in enumerate(log):
        assert np.array_equal(ids.numpy(), trace.expert_ids_NLK[:, layer])
    torch.testing.assert_close(seen, expected, rtol=0, atol=2e-5)
    recorded = recording.trace()
    assert np.array_equal(recorded.offsets, trace.offsets)
    assert np.array_equal(recorded.expert_ids_NLK, trace.expert_ids_NLK)
    if rows is ONE_ROW:  # which needs no use_cache=False: checkpointing makes no cache
        model.train().gradient_checkpointing_enable()
        with routed.replay(trace):
            seen = model(**PACKED, **OFFSETS).logits[0]
            seen.sum().backward()
        torch.testing.assert_close(seen, expected, rtol=0, atol=2e-5)


@pytest.mark.shows("Hugging Face", "packed rows without positions", refused="nothing says where sequences begin")
def test_without_positions_a_packed_row_is_refused():
    """The control: one long sequence is not six short ones."""
    model, routed, trace = with_routes(ALONE)
    with pytest.raises(BatchMismatchError, match=r"batch.*1 sequences.*6"), routed.replay(trace):
        model(input_ids=PACKED["input_ids"])
    with pytest.raises(BatchMismatchError, match=r"holds.*sequences \[1, 0, 2, 3, 4, 5\]"), routed.replay(trace):
        model(**SWAPPED, use_cache=False)


TAKEN_FOR_ONE = {
    "a cache by default": (PACKED, "use_cache=False"),
    "a mask": (PACKED | {"attention_mask": torch.ones_like(PACKED["input_ids"]), "use_cache": False}, "attention_mask"),
    "offsets alone": ({"input_ids": PACKED["input_ids"], "use_cache": False} | OFFSETS, "position_ids that restart"),
    "offsets beside other positions": (SWAPPED | {"use_cache": False} | OFFSETS, r"elsewhere.*offsets"),
}


@pytest.mark.shows(
    "Hugging Face",
    "packed rows beside an attention mask or a cache",
    refused="transformers' attention takes a row for one sequence",
)
@pytest.mark.parametrize(("given", "message"), TAKEN_FOR_ONE.values(), ids=TAKEN_FOR_ONE)
def test_packed_rows_that_attention_takes_for_one_sequence_are_refused(given, message):
    """And rightly so: without a session the logits of later sequences are others than alone."""
    model, routed, trace = with_routes(ALONE)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.from_numpy(each)[None]).logits[0] for each in SEQUENCES])
        assert (model(**given).logits[0] - alone).abs().max() > 0.1
        for session in (routed.replay(trace), routed.record()):
            with pytest.raises(BatchMismatchError, match=message), session:
                model(**given)


def test_packed_sequences_cannot_go_on_over_a_cache(monkeypatch):
    monkeypatch.setattr("foreroute.adapters.hf.forward_tokens.MASKED", ())  # as under kernels of varying lengths
    model = tiny("qwen3_moe")
    routed = hf.attach(model)
    with routed.record() as recording, torch.no_grad():
        cache = model(**PACKED, use_cache=True).past_key_values
        model(input_ids=torch.tensor([[7]]), past_key_values=cache)
    with pytest.raises(ReplayError, match=r"packed.*continued"):
        recording.trace()


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (lambda lengths: pad(lengths, side="right", order="sbhd"), LayoutError, "sequence first"),
        (lambda lengths: pack(lengths, align=2).split_context(1, 0).split_sequence(2, 0), LayoutError, "split"),
        (lambda lengths: "right", LayoutError, "layout is a str"),
        (lambda lengths: pad(lengths[:2], side="right", order="bshd"), BatchMismatchError, "15 packed rows"),
    ],
)
def test_a_layout_that_is_none_of_a_batch_is_refused_at_once(layout, error, message):
    _, routed, trace = with_routes(batch_of(9, 6, 4))
    with pytest.raises(error, match=message):
        routed.replay(trace, layout(trace.lengths)).__enter__()
