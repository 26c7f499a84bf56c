"""Several micro-batches in flight, forward-only passes, errors in the middle, several models, and what is no replay."""

import copy

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

import one_rank as on
from foreroute.adapters import megatron
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, ReplayError, StaleTraceError
from foreroute.layout import pad


def check_micro_batches_in_flight_keep_their_routes():
    """Two forwards before the backwards, in either order, with a forward-only pass between: as one after the other."""
    for recompute in ("none", "uniform", "block", "selective"):
        built, routed = on.attached(recompute)
        batches = [on.tokens(seed) for seed in range(3)]
        traces = [on.foreign(routed.spec, ids, seed) for seed, ids in enumerate(batches)]
        expected = [alone(built, routed, *each) for each in zip(batches, traces, strict=True)]
        for order in ((0, 1), (1, 0)):
            losses = [replayed(built, routed, traces[m], batches[m]) for m in (0, 1)]
            with torch.no_grad():
                replayed(built, routed, traces[2], batches[2])
                on.forward(built, batches[2])
            for m in order:
                built.zero_grad(set_to_none=True)
                losses[m].backward()
                assert on.same(on.gradients(built), expected[m]), f"{recompute}: micro-batch {m} of {order}"


def check_a_recompute_of_the_wrong_micro_batch_is_seen():
    """The control of the check above: what the micro-batches expect of each other differs."""
    built, routed = on.attached("uniform")
    ids = on.tokens()
    first, second = (alone(built, routed, ids, on.foreign(routed.spec, ids, seed)) for seed in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first if "router" in name)


def check_backward_may_run_inside_or_long_after_the_session():
    built, routed = on.attached("uniform")
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
    with routed.replay(trace):
        loss = on.forward(built, ids)
        loss.backward()
    inside = on.gradients(built)
    assert on.same(alone(built, routed, ids, trace), inside)


def check_a_backward_of_native_routes_in_a_session_is_refused():
    """Its recomputation could take the routes of another batch; so does it not run at all."""
    built, routed = on.attached("uniform")
    ids = on.tokens()
    native = on.forward(built, ids)
    with routed.replay(on.foreign(routed.spec, ids)):
        on.forward(built, ids)
        on.refuses(ReplayError, "outside a forward", native.backward)


def check_the_model_is_as_before_after_a_session_and_after_an_error():
    built, routed = on.attached("uniform")
    ids = on.tokens()
    expected = on.step(built, ids)
    state = attributes(built)
    trace = on.foreign(routed.spec, ids)
    replayed(built, routed, trace, ids)
    assert attributes(built) == state
    broken = built.decoder.layers[2].mlp.experts
    for error in (ValueError("in the middle"), KeyboardInterrupt()):
        handle = broken.register_forward_pre_hook(lambda *_, error=error: throw(error))
        on.refuses(type(error), "", lambda: replayed(built, routed, trace, ids))
        handle.remove()
        assert attributes(built) == state
    loss, grads = on.step(built, ids)
    assert torch.equal(loss, expected[0])
    assert on.same(grads, expected[1])
    replayed(built, routed, trace, ids)


def check_other_models_never_notice():
    built, routed = on.attached()
    reference = on.model(seed=1)
    ids = on.tokens()
    expected = on.forward(reference, ids)
    other = megatron.attach(reference)
    trace, others = (on.foreign(each.spec, ids, seed) for seed, each in enumerate((routed, other)))
    with other.replay(others):
        alone_loss = on.forward(reference, ids)
    with routed.replay(trace):
        ours = on.forward(built, ids)
        assert torch.equal(on.forward(reference, ids), expected)
        with other.replay(others):
            assert torch.equal(on.forward(reference, ids), alone_loss)
    assert torch.equal(ours, replayed(built, routed, trace, ids))


def check_sessions_do_not_nest_and_recording_may_go_around():
    built, routed = on.attached()
    again = megatron.attach(built)
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
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
    built, routed = on.attached()
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)

    def idle():
        with routed.replay(trace):
            pass

    on.refuses(ReplayError, "nothing was replayed", idle)
    on.refuses(ReplayError, "nothing was recorded", lambda: nothing_recorded(routed))
    on.refuses(ConfigError, "missing is 'skip'", lambda: routed.replay(trace, missing="skip").__enter__())
    on.refuses(ConfigError, "padding is 'zero'", lambda: routed.place(trace, layout_of(trace), padding="zero"))
    on.refuses(ConfigError, "counts is 'both'", lambda: routed.replaying(print, counts="both"))
    stale = trace.with_weight_version(3)
    on.refuses(StaleTraceError, "[3]", lambda: routed.replay(stale, weight_version=4).__enter__())
    placed = routed.place(stale, layout_of(stale))
    on.refuses(StaleTraceError, "[3]", lambda: routed.replay(placed, weight_version=4).__enter__())
    on.refuses(BatchMismatchError, "placed already", lambda: routed.replay(placed, layout_of(stale)).__enter__())
    with routed.replay(trace):
        on.refuses(ReplayError, "outside a forward of its model", lambda: built.decoder(None, None))
        site = routed.chunks[0].sites[0]
        on.refuses(ReplayError, "outside a forward", lambda: site.module(torch.randn(3, 1, 32)))
        on.forward(built, ids)


def check_megatrons_own_replay_may_not_be_active():
    built, routed = on.attached()
    ids = on.tokens()
    trace = on.recorded(routed, ids)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    on.refuses(ReplayError, "own router replay is active", lambda: replayed(built, routed, trace, ids))
    on.refuses(ReplayError, "own router replay is active", lambda: megatron.attach(built))
    RouterReplay.clear_global_router_replay_action()
    replayed(built, routed, trace, ids)


def check_a_router_that_is_bypassed_or_runs_twice_is_named():
    built, routed = on.attached()
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
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
        on.refuses(ReplayError, f"{site.path} {said}", lambda: replayed(built, routed, trace, ids))
        del site.block.route


def check_a_wrapped_step_tells_what_went_wrong():
    built, routed = on.attached()
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
    batch = {"ids": ids, "routes": trace}
    step = routed.replaying(lambda batches, model: on.forward(model, next(batches)["ids"]))
    on.refuses(BatchMismatchError, "no data iterator", lambda: step(None, built))
    listed = {"ids": ids, "routes": []}
    on.refuses(BatchMismatchError, "routes of a batch are a list", lambda: step(iter([listed]), built))
    forgets = routed.replaying(lambda batches, model: next(batches))
    on.refuses(ReplayError, "did not run the attached model", lambda: forgets(iter([batch]), built))
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

    built, routed = on.attached()
    ids = on.tokens()
    trace = on.foreign(routed.spec, ids)
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


def alone(built, routed, ids, trace):
    """The gradients of one micro-batch, nothing else in flight."""
    built.zero_grad(set_to_none=True)
    replayed(built, routed, trace, ids).backward()
    grads = on.gradients(built)
    built.zero_grad(set_to_none=True)
    return grads


def replayed(built, routed, trace, ids):
    with routed.replay(trace):
        return on.forward(built, ids)


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
