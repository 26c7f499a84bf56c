"""What a cell of the grid must show, seen at its dispatchers."""

import contextlib
import dataclasses
import pickle
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from foreroute.adapters import megatron
from foreroute.ep.transfer.peers import gather_objects
from foreroute.trace import digest
from tests.adapters.megatron.micro_batches import (
    PAD_ROW,
    expected_rows,
    layout_of,
    made_up,
    make_batches,
    shifted,
    split,
)
from tests.adapters.megatron.model_chunks import build, initialize
from tests.adapters.megatron.training_step import Dispatched, forward_step, step
from tests.replay.session_subject import same


def check_cells(cells):
    """Every check on every cell, on this rank; the control, and that nothing is left behind, on the first."""
    for number, cell in enumerate(cells):
        try:
            check_cell(cell, thorough=number == 0)
        except Exception as error:
            raise AssertionError(f"cell [{cell}]: {error}") from error


def check_cell(cell, thorough=False):
    """Recorded routes change no bit, foreign ones reach every dispatcher as they are."""
    initialize(cell)
    chunks, batches = build(cell), make_batches(cell)
    with Dispatched(chunks).watch() as native:
        losses, grads = step(chunks, batches)
    routed = megatron.attach(chunks)
    forward = routed.replaying(forward_step, padding="native")
    with routed.record(weight_version=3) as recording:
        assert_same_step(chunks, batches, forward_step, (losses, grads), "recorded")
    with arrays_stay_out_of_objects():
        trace = recording.trace()
    own = split(trace, batches)
    assert_recorded(trace, own, batches, native, cell)
    assert_same_step(chunks, carrying(batches, own), forward, (losses, grads), "its own routes")

    forward = routed.replaying(forward_step)
    foreign = [made_up(batch, cell, seed) for seed, batch in enumerate(batches)]
    with Dispatched(chunks).watch() as seen:
        foreign_losses, foreign_grads = step(chunks, placed(routed, batches, foreign), forward)
    assert_followed(seen, batches, foreign, native)
    if thorough:
        assert_a_shift_is_seen(chunks, batches, foreign, forward, native)
        assert_no_residue(chunks, batches, foreign, forward, (foreign_losses, foreign_grads), (losses, grads))


def carrying(batches, traces):
    return [dataclasses.replace(batch, routes=trace) for batch, trace in zip(batches, traces, strict=True)]


def placed(routed, batches, traces):
    """Every other trace laid out by hand, the rest left for the adapter to find its place in the batch."""
    given = carrying(batches, traces)
    for m in range(0, len(given), 2):
        given[m] = dataclasses.replace(given[m], routes=routed.shard(traces[m], layout_of(given[m])))
    return given


def assert_same_step(chunks, batches, forward, expected, what):
    losses, grads = step(chunks, batches, forward)
    assert losses == expected[0], f"{what}: losses {losses}, expected {expected[0]}"
    assert same(grads, expected[1]), f"{what}: gradients differ"


def assert_followed(seen, batches, traces, native):
    """The map that each dispatcher was given has the trace's experts in every row, in forward and in recompute."""
    for layer in seen.layers:
        forwards, recomputes = seen.forwards(layer), seen.recomputes(layer)
        assert len(forwards) == len(batches), f"layer {layer} ran {len(forwards)} forwards"
        assert len(recomputes) == len(native.recomputes(layer)), f"layer {layer} was recomputed {len(recomputes)} times"
        for m, (batch, trace, call) in enumerate(zip(batches, traces, forwards, strict=True)):
            padding_R = assert_map_is(call[1], trace, expected_rows(batch), layer, f"layer {layer}, micro-batch {m}")
            load_E = call[1][padding_R].sum(0)
            assert load_E.max() - load_E.min() <= 1, f"layer {layer}, micro-batch {m}: padding went to {load_E} experts"
        for m, (_, map_RE, weights_RE, _) in recomputes:
            assert np.array_equal(map_RE, forwards[m][1]), f"layer {layer}: recompute of micro-batch {m} went elsewhere"
            assert np.array_equal(weights_RE, forwards[m][2]), f"layer {layer}: recompute of {m} weighed otherwise"


def assert_map_is(map_RE, trace, rows_R, layer, where):
    """In rows of tokens; where others are."""
    column = [named.index for named in trace.spec.layers].index(layer)
    routed_R = (rows_R != PAD_ROW) & trace.valid_N[rows_R]
    picked = trace.expert_ids_NLK[rows_R[routed_R], column].astype(int)
    wanted = np.zeros((len(picked), map_RE.shape[1]), bool)
    np.put_along_axis(wanted, picked, True, 1)
    wrong = np.flatnonzero((map_RE[routed_R] != wanted).any(1))
    assert not len(wrong), f"{where}: {len(wrong)} of {len(picked)} rows went to other experts than the trace has"
    assert (map_RE.sum(1) == trace.spec.top_k).all(), f"{where}: rows have {np.unique(map_RE.sum(1))} experts"
    return rows_R == PAD_ROW


@contextlib.contextmanager
def arrays_stay_out_of_objects():
    """What goes from rank to rank as objects is pickled, and on NCCL copied to the GPU for it."""
    gather = dist.all_gather_object

    def watched(values, value, group=None):
        assert b"numpy" not in pickle.dumps(value), "rows are gathered as tensors"
        gather(values, value, group=group)

    with mock.patch.object(dist, "all_gather_object", watched):
        yield


def assert_recorded(trace, traces, batches, native, cell):
    """On all ranks of a model alike: what its dispatchers were given."""
    everywhere = gather_objects(digest(trace), dist.group.WORLD, "comparing")
    assert len(set(everywhere)) == 1 or cell.ep > 1, "ranks of one model recorded different traces"
    for batch, one in zip(batches, traces, strict=True):
        assert [one.tokens(s).tolist() for s in range(len(one))] == [t.tolist() for t in batch.tokens]
        assert one.versions == (3,)
        assert one.valid_N.all()
    for layer in native.layers:
        for batch, one, call in zip(batches, traces, native.forwards(layer), strict=True):
            assert_map_is(call[1], one, expected_rows(batch), layer, f"recorded, layer {layer}")


def assert_no_residue(chunks, batches, traces, forward, foreign, native):
    """A forward-only pass between steps and batches without routes leave steps, and recomputations, as they were."""
    given = carrying(batches, traces)
    losses, _ = step(chunks, given, forward, forward_only=True)
    assert losses == foreign[0], f"forward only: losses {losses}, expected {foreign[0]}"
    assert_same_step(chunks, given, forward, foreign, "after a forward-only pass")
    assert_same_step(chunks, batches, forward, native, "batches without routes")
    # one that is routed natively runs between the forward and the recomputation of another, where stages take turns
    with Dispatched(chunks).watch() as seen:
        step(chunks, [given[0], batches[1], *given[2:]], forward)
    for layer in seen.layers:
        for m, (_, map_RE, *_) in seen.recomputes(layer):
            assert np.array_equal(map_RE, seen.forwards(layer)[m][1]), f"layer {layer}: recompute of {m} went elsewhere"


def assert_a_shift_is_seen(chunks, batches, traces, forward, native):
    """The control of every check above: routes one row late do not pass."""
    with Dispatched(chunks).watch() as seen:
        step(chunks, carrying(batches, [shifted(trace) for trace in traces]), forward)
    if not seen.layers:
        return
    with pytest.raises(AssertionError, match=r"went.*experts"):
        assert_followed(seen, batches, traces, native)
