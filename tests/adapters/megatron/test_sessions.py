"""What sessions of Megatron-Core have beside those of others: routes that are cut, wrapped steps, its own replay."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from foreroute.adapters import megatron
from foreroute.errors import (
    AttachError,
    BatchMismatchError,
    ConfigError,
    LayoutError,
    ReplayError,
    StaleTraceError,
    TraceError,
)
from foreroute.layout import pad
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.python_calls import calls_per_layer


@on_ranks(1)
def test_routes_that_are_cut_keep_what_they_were_cut_with():
    """Versions, policies and the layout."""
    built, routed, ids, trace = on.prepared()
    on.refuses(ConfigError, "padding is 'zero'", lambda: routed.shard(trace, layout_of(trace), padding="zero"))
    on.refuses(ConfigError, "counts is 'both'", lambda: routed.replaying(print, counts="both"))
    stale = trace.with_weight_version(3)
    placed = routed.shard(stale, layout_of(stale), weight_version=3)
    on.refuses(StaleTraceError, "[3]", lambda: routed.shard(stale, layout_of(stale), weight_version=range(4, 6)))
    for other in ({"missing": "native"}, {"missing": "drop"}, {"padding": "native"}):
        on.refuses(ConfigError, "give it to routed.shard", entering(routed.replay, placed, **other))
        with routed.replay(routed.shard(stale, layout_of(stale), **other), **other):
            on.forward(built, ids)
    on.refuses(BatchMismatchError, "cut to a rank already", entering(routed.replay, placed, layout_of(stale)))
    for accepted in (3, np.int64(3), torch.tensor(3), [0, 3], {3}, range(4), np.array([3])):
        with routed.replay(placed, weight_version=accepted):
            on.forward(built, ids)
    on.refuses(StaleTraceError, "[3], expected only 4, 5 ", entering(routed.replay, placed, weight_version=range(4, 6)))


@on_ranks(1)
def test_megatrons_own_replay_may_not_be_active():
    built, routed = on.attached()
    ids = on.tokens()
    trace = on.recorded(routed, ids)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    on.refuses(ReplayError, "own router replay is active", lambda: on.replayed(built, routed, trace, ids))
    on.refuses(ReplayError, "own router replay is active", lambda: megatron.attach(built))
    RouterReplay.clear_global_router_replay_action()
    on.replayed(built, routed, trace, ids)


@on_ranks(1)
def test_a_wrapped_step_tells_what_went_wrong():
    built, routed, ids, trace = on.prepared()
    batch = {"ids": ids, "routes": trace}
    step = routed.replaying(lambda batches, model: on.forward(model, next(batches)["ids"]))
    on.refuses(BatchMismatchError, "no data iterator", lambda: step(None, built))
    listed = {"ids": ids, "routes": []}
    on.refuses(BatchMismatchError, "routes of a batch are a list", lambda: step(iter([listed]), built))
    for misspelled in ({"ids": ids, "route": trace}, SimpleNamespace(ids=ids)):
        on.refuses(BatchMismatchError, "none under 'routes'", lambda batch=misspelled: step(iter([batch]), built))
    with on.maps_given(routed) as maps:
        step(iter([{"ids": ids, "routes": None}]), built)  # said in so many words: natively
    on.assert_followed(maps, on.recorded(routed, ids))
    forgets = routed.replaying(lambda batches, model: next(batches))
    on.refuses(ReplayError, "no forward of the attached model ran", lambda: forgets(iter([batch]), built))
    greedy = routed.replaying(lambda batches, model: on.forward(model, [next(batches), next(batches)][0]["ids"]))
    on.refuses(ReplayError, "took 2 batches", lambda: greedy(iter([batch, batch]), built))
    late = routed.replaying(lambda batches, model: on.forward(model, ids))
    on.refuses(ReplayError, "took 0 batches", lambda: late(iter([batch]), built))
    other = on.model(seed=1)
    on.refuses(AttachError, "another model", lambda: step(iter([batch]), other))
    with on.maps_given(routed) as maps:
        step(iter([batch]), built)
    on.assert_followed(maps, trace)
    with routed.replay(trace):
        on.forward(built, ids)
        on.refuses(ReplayError, "already replaying", lambda: step(iter([batch]), built))
        with ThreadPoolExecutor(1, thread_name_prefix="other") as other_thread:
            elsewhere = other_thread.submit(step, iter([batch]), built)
            on.refuses(ReplayError, "thread 'other_0'", elsewhere.result)


@on_ranks(1)
def test_a_step_may_be_an_object_with_attributes_of_its_own():
    class Step:
        def __init__(self):
            self._step = self._telemetry = self._open = 0

        def __call__(self, batches, model):
            return on.forward(model, next(batches)["ids"])

    built, routed, ids, trace = on.prepared()
    with on.maps_given(routed) as maps:
        routed.replaying(Step())(iter([{"ids": ids, "routes": trace}]), built)
    on.assert_followed(maps, trace)


@on_ranks(1)
def test_a_wrapped_step_adds_up_telemetry():
    built, routed = on.attached()
    ids = on.tokens()
    own, other = on.recorded(routed, ids), on.foreign(routed.spec, ids)
    step = routed.replaying(lambda batches, model: on.forward(model, next(batches)["ids"]), telemetry=True)
    on.refuses(ReplayError, "no telemetry", step.agreement)
    for routes in (own, None, own):
        step(iter([{"ids": ids, "routes": routes}]), built)
    assert step.agreement().routing.rows == 2 * ids.numel()
    assert not step.agreement().routing.differing_L.any()
    step(iter([{"ids": ids, "routes": other}]), built)
    assert step.agreement().routing.rows == 3 * ids.numel()
    assert step.agreement().routing.differing_L.min() > 0
    assert step.expert_counts_LE().sum() == 3 * ids.numel() * 2 * 2


@on_ranks(1)
def test_a_layer_costs_few_calls():
    """However many guards there are, what is the same for all layers is done once for a pass."""

    @contextmanager
    def steps(recompute, layers):
        built, routed, ids, trace = on.prepared(recompute, layers=layers, moe_layer_freq=[1] * layers)
        with routed.replay(trace):
            yield lambda: on.step(built, ids)

    for recompute, most in (("none", 12), ("uniform", 40)):
        calls = calls_per_layer(partial(steps, recompute))
        assert 1 < calls <= most, (recompute, calls)


def layout_of(trace):
    return pad(trace.lengths, side="right", order="sbhd", to=on.WIDTH)


@on_ranks(1)
def test_arguments_of_the_wrong_kind_are_refused_by_name():
    """Where this framework takes them and others do not; `tests.replay` has what all take."""
    built, routed, ids, trace = on.prepared()
    placed = routed.shard(trace, layout_of(trace))
    for given in (True, 1.0, "1", b"1", [], {}, [None], ["1"], [1.0], [[1]], {1: 2}, object(), -2, range(-3, 0)):
        on.refuses(ConfigError, "expected a whole number", entering(routed.replay, placed, weight_version=given))
    for given in (None, 1, "yes", torch.tensor([1, 0]), object()):
        on.refuses(ConfigError, "True or False", partial(routed.replaying, print, telemetry=given))
    for given in (None, 1, "rollout.safetensors", [trace], trace.expert_ids_NLK, trace.spec, routed, type(trace)):
        on.refuses(TraceError, "expected a RoutingTrace", partial(routed.shard, given, layout_of(trace)))
    for given in (None, "right", trace, trace.lengths):
        on.refuses(LayoutError, "layout is a", partial(routed.shard, trace, given))
        if given is not None:
            on.refuses(LayoutError, "layout is a", entering(routed.replay, trace, given))
    on.refuses(ConfigError, "forward_step is a", partial(routed.replaying, None))
    on.refuses(ConfigError, "routes_of is a", partial(routed.replaying, print, routes_of="routes"))
    on.replayed(built, routed, trace, ids)


def entering(make, *args, **options):
    return lambda: make(*args, **options).__enter__()
