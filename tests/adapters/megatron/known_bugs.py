"""Situations that known bugs of replay in Megatron are made of, each a function of the way it is driven.

Every function raises AssertionError, or whatever Megatron raises, where routes are not executed as recorded.
"""

import gc

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from foreroute import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.errors import TraceContentError
from tests.adapters.megatron import replay_drivers
from tests.adapters.megatron.grid import Cell, with_settings
from tests.adapters.megatron.grid_checks import assert_followed, assert_same_step
from tests.adapters.megatron.micro_batches import PACKED_ALIKE, made_up, make_batches
from tests.adapters.megatron.model_chunks import build, initialize
from tests.adapters.megatron.training_step import Dispatched, forward_step, native_routes, step

WHOLE = Cell(packed=True, layers=2)
RECOMPUTED = Cell(packed=True, layers=2, recompute="uniform")


def forward_only_pass(driver):
    """Old log-probs on other sequences, then an update that recomputes."""
    chunks, batches, native, driven = _set_up(RECOMPUTED, driver)
    step(chunks, driven.give(batches, _traces(batches, RECOMPUTED, seed=7)), driven.forward, forward_only=True)
    _assert_step_follows(chunks, batches, native, driven, RECOMPUTED)


def one_forward_one_backward(driver):
    """1F1B: a stage recomputes a micro-batch when it has already run the forward of the next."""
    cell = Cell(packed=True, pp=2, recompute="uniform")
    # of equal length, so that nothing but the routes tells micro-batches apart
    chunks, batches, native, driven = _set_up(cell, driver, own_layers_only=True, lengths=PACKED_ALIKE[:3])
    _assert_step_follows(chunks, batches, native, driven, cell)


def batches_without_routes(driver):
    """1F1B again: a micro-batch that is routed natively runs between the forward and the recompute of another."""
    cell = Cell(packed=True, pp=2, recompute="uniform")
    chunks, batches, native, driven = _set_up(cell, driver, own_layers_only=True, lengths=PACKED_ALIKE[:3])
    given = driven.give(batches, _traces(batches, cell))
    given[1] = batches[1]
    with Dispatched(chunks).watch() as seen:
        step(chunks, given, driven.forward)
    for layer in seen.layers:
        assert len(seen.recomputes(layer)) == len(native.recomputes(layer))
        for m, (_, map_RE, _, _) in seen.recomputes(layer):
            first_RE = seen.forwards(layer)[m][1]
            assert np.array_equal(map_RE, first_RE), f"layer {layer}: recompute of micro-batch {m} went elsewhere"


def virtual_stages(driver):
    """Interleaved 1F1B: the routers of a rank belong to chunks that run different micro-batches."""
    cell = Cell(packed=True, pp=2, vpp=2, recompute="uniform")
    chunks, batches, native, driven = _set_up(cell, driver, own_layers_only=True)
    _assert_step_follows(chunks, batches, native, driven, cell)


def second_model(driver):
    """A reference model made after the policy, whose routers nobody asked to replay."""
    chunks, batches, native, driven = _set_up(WHOLE, driver)
    reference = build(WHOLE, seed=5)
    expected = step(reference, batches)
    _assert_step_follows(chunks, batches, native, driven, WHOLE)
    assert_same_step(reference, batches, forward_step, expected, "the reference model")


def list_cleared_for_another_model(driver):
    """The global list is cleared, so that it does not leak or so that another model gets it to itself."""
    chunks, batches, native, driven = _set_up(WHOLE, driver)
    _assert_step_follows(chunks, batches, native, driven, WHOLE)
    RouterReplay.clear_global_router_replay_instances()
    build(WHOLE, seed=5)
    _assert_step_follows(chunks, batches, native, driven, WHOLE)


def multi_token_prediction(driver):
    """A router of multi-token prediction joins the routers of the decoder."""
    cell = with_settings({"mtp_num_layers": 1}, packed=True, layers=2)
    chunks, batches, native, driven = _set_up(cell, driver)
    _assert_step_follows(chunks, batches, native, driven, cell)


def dense_layers_first(driver):
    """An engine reports every decoder layer, and the first of a stage's routers is not in the first of its layers."""
    cell = with_settings({"moe_layer_freq": [0, 1, 1, 1]}, packed=True, pp=2)
    chunks, batches, native, _ = _set_up(cell, driver)
    first = chunks[0].decoder.layers[0].layer_number - 1
    driven = getattr(replay_drivers, driver)(chunks, [first + i for i in range(len(native.layers))])
    reported = [made_up(batch, range(cell.layers), m, complete=True) for m, batch in enumerate(batches)]
    routed = [trace.select_layers(map(RoutedLayer, cell.routed_layers)) for trace in reported]
    with Dispatched(chunks).watch() as seen:
        step(chunks, driven.give(batches, routed if driver == "Foreroute" else reported), driven.forward)
    assert_followed(seen, batches, routed, native)


def batch_first(driver):
    """A padded batch, whose rows Megatron's routers see sequence first."""
    cell = Cell(layers=2)
    chunks, batches, native, driven = _set_up(cell, driver, lengths=[(16, 16)] * 3)
    _assert_step_follows(chunks, batches, native, driven, cell)


def exception_in_a_forward(driver):
    """A step that fails half way, and a native pass of the same shape after it."""
    chunks, batches, _, driven = _set_up(WHOLE, driver, lengths=PACKED_ALIKE[:3])
    expected = step(chunks, batches)

    def fails(*args):
        raise RuntimeError("out of memory")

    failing = chunks[0].output_layer.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(chunks, driven.give(batches, _traces(batches, WHOLE)), driven.forward)
    failing.remove()
    assert_same_step(chunks, batches, forward_step, expected, "a native step after a failed one")


def picks_twice(driver):
    """A row that names one expert twice, as zeros in the place of a missing route do."""
    chunks, batches, _, driven = _set_up(WHOLE, driver)
    traces = _traces(batches, WHOLE)
    if driver == "Foreroute":
        _assert_refused_at_the_door(traces[1])
        return
    given = driven.give(batches, traces)
    given[1].routes[0][3] = 0
    with Dispatched(chunks).watch() as seen:
        step(chunks, given, driven.forward)
    for _, map_RE, _, _ in seen.forwards(0):
        assert (map_RE.sum(1) == 2).all(), f"rows were sent to {np.unique(map_RE.sum(1))} experts"


def routes_kept_for_a_recompute_that_never_comes(driver):
    """Without recomputation, nothing takes routes out of the queue."""
    chunks, batches, _, driven = _set_up(WHOLE, driver)
    kept = []
    for seed in range(3):
        step(chunks, driven.give(batches, _traces(batches, WHOLE, seed)), driven.forward)
        driven.done()
        gc.collect()
        kept.append(_bytes_of_ids())
    assert kept[0] == kept[-1], f"after each step {kept} bytes of expert ids were kept"


def _set_up(cell, driver, own_layers_only=False, lengths=None):
    initialize(cell)
    chunks, batches = build(cell), make_batches(cell, lengths=lengths)
    *_, native = native_routes(chunks, batches)
    layers = sorted(native.layers) if own_layers_only else range(len(cell.routed_layers))
    return chunks, batches, native, getattr(replay_drivers, driver)(chunks, layers)


def _traces(batches, cell, seed=0):
    return [made_up(batch, cell.routed_layers, 10 * seed + m, complete=True) for m, batch in enumerate(batches)]


def _assert_step_follows(chunks, batches, native, driven, cell):
    traces = _traces(batches, cell)
    with Dispatched(chunks).watch() as seen:
        step(chunks, driven.give(batches, traces), driven.forward)
    driven.done()
    assert_followed(seen, batches, traces, native)


def _assert_refused_at_the_door(trace):
    routes = trace.expert_ids_NLK.copy()
    routes[3, 0] = 0
    spec = RoutingSpec(8, 2, tuple(map(RoutedLayer, range(2))))
    with pytest.raises(TraceContentError, match="twice"):
        RoutingTrace.from_sequences(spec, [trace.token_ids_N], [routes])


def _bytes_of_ids():
    """Of all integer tensors alive with K columns."""
    alive = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return sum(x.nbytes for x in alive if not x.is_floating_point() and x.dim() >= 2 and x.shape[-1] == 2) + sum(
        x.nbytes for x in gc.get_objects() if isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.shape[-1:] == (2,)
    )
