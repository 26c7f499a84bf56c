"""Several micro-batches in flight, forward-only passes, errors in the middle, several models, and what is no replay."""

import copy
import pickle
import threading
from functools import partial

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


def check_micro_batches_in_flight_keep_their_routes():
    """Two forwards before the backwards, in either order, with a forward-only pass between: as one after the other."""
    for recompute in ("none", "uniform", "block", "selective"):
        built, routed = on.attached(recompute)
        batches = [on.tokens(seed) for seed in range(3)]
        traces = [on.foreign(routed.spec, ids, seed) for seed, ids in enumerate(batches)]
        expected = [on.alone(built, routed, *each) for each in zip(batches, traces, strict=True)]
        for order in ((0, 1), (1, 0)):
            losses = [on.replayed(built, routed, traces[m], batches[m]) for m in (0, 1)]
            with torch.no_grad():
                on.replayed(built, routed, traces[2], batches[2])
                on.forward(built, batches[2])
            for m in order:
                built.zero_grad(set_to_none=True)
                losses[m].backward()
                assert on.same(on.gradients(built), expected[m]), f"{recompute}: micro-batch {m} of {order}"


def check_a_recompute_of_the_wrong_micro_batch_is_seen():
    """The control of the check above: what the micro-batches expect of each other differs."""
    built, routed = on.attached("uniform")
    ids = on.tokens()
    first, second = (on.alone(built, routed, ids, on.foreign(routed.spec, ids, seed)) for seed in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first if "router" in name)


def check_backward_may_run_inside_or_long_after_the_session():
    built, routed, ids, trace = on.prepared("uniform")
    with routed.replay(trace):
        loss = on.forward(built, ids)
        loss.backward()
    inside = on.gradients(built)
    assert on.same(on.alone(built, routed, ids, trace), inside)


def check_a_backward_of_native_routes_in_a_session_is_refused():
    """Its recomputation could take the routes of another batch; so does it not run at all."""
    built, routed = on.attached("uniform")
    ids = on.tokens()
    native = on.forward(built, ids)
    with routed.replay(on.foreign(routed.spec, ids)):
        on.forward(built, ids)
        on.refuses(ReplayError, "outside a forward", native.backward)


def check_the_model_is_as_before_after_a_session_and_after_an_error():
    built, routed, ids, trace = on.prepared("uniform")
    expected = on.step(built, ids)
    state = attributes(built)
    on.replayed(built, routed, trace, ids)
    assert attributes(built) == state
    broken = built.decoder.layers[2].mlp.experts
    for error in (ValueError("in the middle"), KeyboardInterrupt()):
        handle = broken.register_forward_pre_hook(lambda *_, error=error: throw(error))
        on.refuses(type(error), "", lambda: on.replayed(built, routed, trace, ids))
        handle.remove()
        assert attributes(built) == state
    loss, grads = on.step(built, ids)
    assert torch.equal(loss, expected[0])
    assert on.same(grads, expected[1])
    on.replayed(built, routed, trace, ids)


def check_sessions_do_not_nest_and_recording_may_go_around():
    built, routed, ids, trace = on.prepared()
    again = megatron.attach(built)
    with routed.record() as recording, routed.replay(trace):
        on.forward(built, ids)
        on.refuses(ReplayError, "already replaying", lambda: routed.replay(trace).__enter__())
        step = routed.replaying(lambda batches, model: on.forward(model, next(batches)["ids"]))
        on.refuses(ReplayError, "already replaying", lambda: step(iter([{"ids": ids}]), built))
        on.refuses(ReplayError, "cannot be copied", lambda: copy.deepcopy(built))
        on.refuses(AttachError, "session is open", lambda: megatron.attach(built))
        on.refuses(ReplayError, "attached twice", lambda: again.replay(trace).__enter__())
    assert recording.trace().equals(trace)


def check_what_is_no_replay_is_refused():
    built, routed, ids, trace = on.prepared()

    def idle():
        with routed.replay(trace):
            pass

    on.refuses(ReplayError, "nothing was replayed", idle)
    on.refuses(ReplayError, "nothing was recorded", lambda: nothing_recorded(routed))
    on.refuses(ConfigError, "missing is 'skip'", lambda: routed.replay(trace, missing="skip").__enter__())
    on.refuses(ConfigError, "padding is 'zero'", lambda: routed.shard(trace, layout_of(trace), padding="zero"))
    on.refuses(ConfigError, "counts is 'both'", lambda: routed.replaying(print, counts="both"))
    stale = trace.with_weight_version(3)
    on.refuses(StaleTraceError, "[3]", lambda: routed.replay(stale, weight_version=4).__enter__())
    placed = routed.shard(stale, layout_of(stale), weight_version=3)
    on.refuses(StaleTraceError, "[3]", lambda: routed.shard(stale, layout_of(stale), weight_version=range(4, 6)))
    on.refuses(StaleTraceError, "[3]", lambda: routed.replay(placed, weight_version=4).__enter__())
    for other in ({"missing": "native"}, {"missing": "drop"}, {"padding": "native"}):
        on.refuses(
            ConfigError, "give it to routed.shard", lambda other=other: routed.replay(placed, **other).__enter__()
        )
        with routed.replay(routed.shard(stale, layout_of(stale), **other), **other):
            on.forward(built, ids)
    on.refuses(BatchMismatchError, "cut to a rank already", lambda: routed.replay(placed, layout_of(stale)).__enter__())
    with routed.replay(trace):
        hidden, causal = torch.randn(on.WIDTH, 2, 32), torch.ones(on.WIDTH, on.WIDTH, dtype=torch.bool).triu(1)
        on.refuses(ReplayError, "outside a forward of GPTModel", lambda: built.decoder(hidden, causal))
        site = routed.chunks[0].sites[0]
        on.refuses(ReplayError, "outside a forward", lambda: site.module(torch.randn(3, 1, 32)))
        on.forward(built, ids)


def check_megatrons_own_replay_may_not_be_active():
    built, routed = on.attached()
    ids = on.tokens()
    trace = on.recorded(routed, ids)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    on.refuses(ReplayError, "own router replay is active", lambda: on.replayed(built, routed, trace, ids))
    on.refuses(ReplayError, "own router replay is active", lambda: megatron.attach(built))
    RouterReplay.clear_global_router_replay_action()
    on.replayed(built, routed, trace, ids)


def check_a_router_that_is_bypassed_or_runs_twice_is_named():
    built, routed, ids, trace = on.prepared()
    site = routed.chunks[0].sites[1]
    route = type(site.block).route
    twice = lambda block, *args: (route(block, *args), route(block, *args))[1]  # noqa: E731
    remembered = []

    def once(block, *args):
        remembered.append(remembered[0] if remembered else route(block, *args))
        return remembered[0]

    once(site.block, torch.randn(on.WIDTH, 2, 32), None)
    for stand_in, said in ((once, "selected 0 times"), (twice, "selected 2 times")):
        site.block.route = stand_in.__get__(site.block)
        on.refuses(ReplayError, f"{site.path} {said}", lambda: on.replayed(built, routed, trace, ids))
        del site.block.route


def check_a_wrapped_step_tells_what_went_wrong():
    built, routed, ids, trace = on.prepared()
    batch = {"ids": ids, "routes": trace}
    step = routed.replaying(lambda batches, model: on.forward(model, next(batches)["ids"]))
    on.refuses(BatchMismatchError, "no data iterator", lambda: step(None, built))
    listed = {"ids": ids, "routes": []}
    on.refuses(BatchMismatchError, "routes of a batch are a list", lambda: step(iter([listed]), built))
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
    on.refuses(ReplayError, "no micro-batch is being replayed", lambda: routed.session)


def check_a_step_may_be_an_object_with_attributes_of_its_own():
    class Step:
        def __init__(self):
            self._step = self._telemetry = self._open = 0

        def __call__(self, batches, model):
            return on.forward(model, next(batches)["ids"])

    built, routed, ids, trace = on.prepared()
    with on.maps_given(routed) as maps:
        routed.replaying(Step())(iter([{"ids": ids, "routes": trace}]), built)
    on.assert_followed(maps, trace)


def check_a_wrapped_step_adds_up_telemetry():
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
    with routed.replay(other, telemetry=True, counts="replayed") as session:
        on.forward(built, ids)
    counted = session.expert_counts_LE()
    picked = other.expert_ids_NLK.astype(int)
    assert [counted[layer].tolist() for layer in range(2)] == [
        [int((picked[:, layer] == expert).sum()) for expert in range(8)] for layer in range(2)
    ]


def layout_of(trace):
    return pad(trace.lengths, side="right", order="sbhd", to=on.WIDTH)


def nothing_recorded(routed):
    with routed.record() as recording:
        pass
    recording.trace()


def attributes(built):
    """What every module holds itself, by identity."""
    return {
        (path, name): id(value)
        for path, module in built.named_modules()
        for name, value in vars(module).items()
        if name in ("forward", "router_replay", "_apply_expert_bias", "_apply_aux_loss", "__deepcopy__")
    }


def throw(error):
    raise error


def check_arguments_of_the_wrong_kind_are_refused_by_name():
    built, routed, ids, trace = on.prepared()
    trace = trace.with_weight_version(1)
    placed = routed.shard(trace, layout_of(trace))
    state = attributes(built)
    for given in (True, 1.0, "1", b"1", [], {}, [None], ["1"], [1.0], [[1]], {1: 2}, object(), -2, range(-3, 0)):
        for routes in (trace, placed):
            said = "expected a whole number"
            on.refuses(ConfigError, said, entering(routed.replay, routes, weight_version=given))
    for given in (True, 1.5, "1", None, [1], object(), -2, 2**31):
        on.refuses(ConfigError, "expected a whole number", entering(routed.record, weight_version=given))
    for given in (None, 1, "yes", torch.tensor([1, 0]), object()):
        on.refuses(ConfigError, "True or False", entering(routed.replay, trace, telemetry=given))
        on.refuses(ConfigError, "True or False", partial(routed.replaying, print, telemetry=given))
    for given in (None, 0, [], "x", True, b"error"):
        for name in ("missing", "padding", "counts"):
            if (name, given) != ("padding", None):  # which is the framework's own default
                on.refuses(ConfigError, "expected one of", entering(routed.replay, trace, **{name: given}))
    for given in (None, 1, "rollout.safetensors", [trace], trace.expert_ids_NLK, trace.spec, routed, type(trace)):
        on.refuses(TraceError, "expected a RoutingTrace", entering(routed.replay, given))
        on.refuses(TraceError, "expected a RoutingTrace", partial(routed.shard, given, layout_of(trace)))
        on.refuses(AttachError, "expected a model of Megatron-Core", partial(megatron.attach, given))
    on.refuses(AttachError, "expected a model of Megatron-Core", partial(megatron.attach, [None]))
    for given in (None, "right", trace, trace.lengths):
        on.refuses(LayoutError, "layout is a", partial(routed.shard, trace, given))
        if given is not None:
            on.refuses(LayoutError, "layout is a", entering(routed.replay, trace, given))
    on.refuses(ConfigError, "forward_step is a", partial(routed.replaying, None))
    on.refuses(ConfigError, "routes_of is a", partial(routed.replaying, print, routes_of="routes"))
    assert attributes(built) == state
    on.replayed(built, routed, trace, ids)


def entering(make, *args, **options):
    return lambda: make(*args, **options).__enter__()


def check_one_version_or_several_may_be_expected():
    built, routed, ids, trace = on.prepared()
    trace = trace.with_weight_version(1)
    for routes in (trace, routed.shard(trace, layout_of(trace))):
        for accepted in (1, np.int64(1), torch.tensor(1), [0, 1], {1}, range(3), np.array([1])):
            with routed.replay(routes, weight_version=accepted):
                on.forward(built, ids)
        stale = lambda routes=routes: routed.replay(routes, weight_version=range(2, 5)).__enter__()  # noqa: E731
        on.refuses(StaleTraceError, "versions [1], expected only 2, 3, 4 ", stale)
    unstated = trace.with_weight_version(-1)
    on.refuses(StaleTraceError, "[-1]", lambda: routed.replay(unstated, weight_version=range(-2, 1)).__enter__())


def check_batches_of_wrong_values_are_refused():
    built, routed, ids, trace = on.prepared()
    mask = torch.zeros(ids.shape)
    for session in (lambda: routed.replay(trace), routed.record):
        on.refuses(BatchMismatchError, "padding_mask is torch.float32", in_session(session, built, ids, mask))
        on.refuses(BatchMismatchError, "padding_mask is torch.int64", in_session(session, built, ids, mask.long()))
        on.refuses(BatchMismatchError, "input_ids are torch.float32", in_session(session, built, ids.float()))


def in_session(session, built, ids, mask=None):
    def run():
        with session():
            on.forward(built, ids, **({} if mask is None else {"padding_mask": mask}))

    return run


def check_a_session_is_opened_once():
    built, routed = on.attached()
    ids = on.tokens()
    for session in (routed.replay(on.foreign(routed.spec, ids)), routed.record()):
        with session:
            on.forward(built, ids)
        on.refuses(ReplayError, "opened once", session.__enter__)
        session.__exit__(None, None, None)


def check_sessions_may_close_in_any_order():
    built, routed, ids, trace = on.prepared()
    state = attributes(built)
    recording, replay = routed.record(), routed.replay(trace)
    recording.__enter__()
    replay.__enter__()
    forced = on.forward(built, ids)
    recording.__exit__(None, None, None)
    assert torch.equal(on.forward(built, ids), forced)
    with routed.record() as inner:
        on.forward(built, ids)
    assert inner.trace().equals(trace)
    replay.__exit__(None, None, None)
    assert attributes(built) == state


def check_a_model_attached_twice_has_one_session_at_a_time():
    built, one, ids, trace = on.prepared("uniform")
    two = megatron.attach(built)
    state = attributes(built)
    with one.replay(trace):
        expected = on.forward(built, ids)
        for session in (two.replay(trace), two.record()):
            on.refuses(ReplayError, "attached twice", session.__enter__)
        assert torch.equal(on.forward(built, ids), expected)
    with two.record() as recording:
        on.refuses(ReplayError, "attached twice", expected.backward)
        on.forward(built, ids)
    assert recording.trace().num_rows == ids.numel()
    assert attributes(built) == state
    assert torch.equal(on.replayed(built, two, trace, ids), expected)


def check_no_part_of_a_model_is_copied_inside_a_session():
    built, routed = on.attached()
    router = routed.chunks[0].sites[0].module
    with routed.record():
        for part in (built, built.decoder, router):
            on.refuses(ReplayError, "cannot be copied", lambda part=part: copy.deepcopy(part))
            on.refuses(ReplayError, "cannot be copied", lambda part=part: pickle.dumps(part))


def check_what_somebody_wraps_inside_a_session_still_runs_after_it():
    """Their wrapper keeps ours below it, for good; sessions and native steps go on, each router once."""
    settings = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
    for part, name in (("trunk", "forward"), *((0, name) for name in WRAPPED)):
        built, routed, ids, trace = on.prepared(**settings)
        native = on.step(built, ids)
        chunk = routed.chunks[0]
        holder = chunk.sites[0].module if part == 0 else getattr(chunk, part)
        with routed.replay(trace):
            expected = on.forward(built, ids)
            setattr(holder, name, wrapped(getattr(holder, name)))
            assert torch.equal(on.forward(built, ids), expected), (part, name)
        again = on.step(built, ids)
        assert torch.equal(native[0], again[0]), (part, name)
        assert on.same(native[1], again[1]), (part, name)
        with routed.replay(trace), routed.record() as recording:
            assert torch.equal(on.forward(built, ids), expected), (part, name)
        assert recording.trace().equals(trace), (part, name)
        assert torch.equal(on.step(built, ids)[0], native[0]), (part, name)


WRAPPED = ("forward", "_apply_expert_bias", "_apply_aux_loss")


def wrapped(theirs):
    return lambda *args, **kwargs: theirs(*args, **kwargs)


def check_a_session_opened_or_closed_in_the_middle_of_a_forward_is_named():
    built, routed = on.attached()
    ids = on.tokens()
    middle = built.decoder.layers[2]
    closing = routed.record()
    closing.__enter__()
    handle = middle.register_forward_pre_hook(lambda *_: closing.__exit__(None, None, None) or None)
    on.refuses(ReplayError, "closed in the middle", lambda: on.forward(built, ids))
    handle.remove()
    opening = routed.record()
    handle = middle.register_forward_pre_hook(lambda *_: opening.__enter__() and None)
    on.refuses(ReplayError, "outside a forward", lambda: on.forward(built, ids))
    handle.remove()
    opening.__exit__(None, None, None)
    on.forward(built, ids)


def check_a_session_belongs_to_the_thread_that_opened_it():
    built, routed, ids, trace = on.prepared("uniform")
    expected = on.alone(built, routed, ids, trace)
    step = routed.replaying(lambda batches, model: on.forward(model, next(batches)["ids"]))
    with routed.replay(trace):
        loss = on.forward(built, ids)
        for refused in (
            lambda: on.forward(built, ids),
            lambda: routed.record().__enter__(),
            lambda: routed.replay(trace).__enter__(),
            lambda: step(iter([{"ids": ids, "routes": trace}]), built),
        ):
            error = in_thread(refused)
            assert isinstance(error, ReplayError), error
            assert "thread 'other'" in str(error)
            assert f"thread {threading.current_thread().name!r}" in str(error)
        assert torch.equal(on.forward(built, ids), loss)
    built.zero_grad(set_to_none=True)
    assert in_thread(loss.backward) is None, "autograd of a GPU recomputes in threads of its own"
    assert on.same(on.gradients(built), expected)
    assert torch.equal(in_thread(lambda: on.replayed(built, routed, trace, ids)), loss)


def check_a_recomputation_in_the_middle_of_another_threads_forward_is_refused():
    built, routed, ids, trace = on.prepared("uniform")
    loss = on.replayed(built, routed, trace, ids)
    outcome = []
    middle = built.decoder.layers[1]
    handle = middle.register_forward_pre_hook(lambda *_: outcome or outcome.append(in_thread(loss.backward)))
    with torch.no_grad():
        on.replayed(built, routed, trace, ids)
    handle.remove()
    assert isinstance(outcome[0], ReplayError), outcome
    assert "thread 'other'" in str(outcome[0])


def in_thread(function):
    """What the function returned, or raised, in a thread of its own."""
    outcome = []

    def run():
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return outcome[0]
