"""How sessions open and close: what they touch, in which order they go, and what is no session or handed to none."""

import copy
import pickle
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from foreroute import RoutingTrace, concatenate
from foreroute.errors import (
    AttachError,
    BatchMismatchError,
    ConfigError,
    ReplayError,
    SpecMismatchError,
    StaleTraceError,
    TraceError,
)
from tests.replay.session_subject import (
    batch_of,
    entering,
    foreign,
    map_of,
    prepared,
    recorded,
    refuses,
    replayed,
    router_paths,
    same,
    step,
)

BATCH = batch_of()
UNPADDED = batch_of(9, 9, 9)  # Megatron's own bias of experts fails on a mask of padding


def attributes(model):
    """What every module holds itself, by identity."""
    return {
        (path, name): id(value)
        for path, module in model.named_modules()
        for name, value in {**vars(module), **module._forward_hooks}.items()
    }


def check_the_model_is_as_before_after_sessions_and_errors(framework):
    for gate in framework.gates:
        on = framework.built(gate)
        on.layers[-1].eval()
        native = step(on, None, UNPADDED)
        first = attributes(on.model)
        step(on, None, UNPADDED)
        own = {name for name, value in attributes(on.model).items() if first.get(name) != value}
        before = {name: value for name, value in attributes(on.model).items() if name not in own}
        weights, random = state_of(on.model), torch.get_rng_state()

        def require_as_before(on=on, before=before, own=own, weights=weights):
            assert {name: value for name, value in attributes(on.model).items() if name not in own} == before
            assert same(weights, state_of(on.model))

        trace = foreign(on.routed.spec, UNPADDED)
        assert torch.equal(random, torch.get_rng_state()), "attaching drew random numbers"
        require_as_before()
        with on.routed.replay(trace):
            assert attributes(on.model) != before, "the check must be able to see an override"
            loss = on.loss(UNPADDED)
        loss.backward()
        for error in (ValueError("in the middle"), KeyboardInterrupt()):
            handle = on.layers[2].register_forward_pre_hook(lambda *_, error=error: throw(error))
            refuses(type(error), None, lambda on=on, trace=trace: replayed(on, trace, UNPADDED))
            handle.remove()
            require_as_before()
        refuses(BatchMismatchError, None, lambda on=on, trace=trace: replayed(on, trace, UNPADDED.select(0, 1)))
        require_as_before()
        again = step(on, None, UNPADDED)
        assert torch.equal(native[0], again[0]), gate
        assert same(native[1], again[1]), gate


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def throw(error):
    raise error


def check_a_session_without_a_forward_is_no_silent_no_op(framework):
    on = framework.built()
    with pytest.raises(ReplayError, match=r"nothing.*replayed"), on.routed.replay(foreign(on.routed.spec, BATCH)):
        pass
    with on.routed.record() as recording:
        pass
    refuses(ReplayError, r"nothing.*recorded", recording.trace)
    refuses(ReplayError, r"no micro-batch.*replayed", lambda: on.routed.session)


def check_a_session_that_nobody_opens_warns(framework):
    on, trace = prepared(framework)
    for name, given in (("replay", [trace]), ("record", [])):
        with pytest.warns(UserWarning, match=rf"{name}\(\) .*never opened.*`with routed\.{name}") as told:
            getattr(on.routed, name)(*given)
        assert [each.filename for each in told] == [__file__]
        with (
            pytest.warns(UserWarning, match="never opened"),
            pytest.raises(AttributeError, match=rf"no agreement, .*`with routed\.{name}"),
        ):
            _ = getattr(on.routed, name)(*given).agreement
        once = getattr(on.routed, name)(*given)
        with once:
            on.run(batch_of())
        refuses(ReplayError, rf"{name}.. returns.*once", once.__enter__)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with on.routed.record(), on.routed.replay(trace):
            on.run(batch_of())


def check_replays_do_not_nest_and_recordings_go_around_or_inside(framework):
    on, trace = prepared(framework)
    with on.routed.record(weight_version=1) as around, on.routed.replay(trace) as session:
        assert on.routed.session is session
        on.run(BATCH)
        refuses(ReplayError, "already replaying", entering(on.routed.replay, trace))
        with on.routed.record(weight_version=1) as inside:
            on.run(BATCH)
    assert inside.trace().equals(trace)
    assert around.trace().equals(concatenate([trace, trace]))
    before, recording, replay = attributes(on.model).keys(), on.routed.record(), on.routed.replay(trace)
    recording.__enter__()
    replay.__enter__()
    forced = on.loss(BATCH)
    recording.__exit__(None, None, None)  # in any order
    assert torch.equal(on.loss(BATCH), forced)
    replay.__exit__(None, None, None)
    assert attributes(on.model).keys() == before
    assert not torch.equal(on.loss(BATCH), forced)


def check_a_model_attached_twice_has_one_session_at_a_time(framework):
    for recompute in framework.recomputations[:2]:
        on = framework.built(recompute=recompute)
        two, trace = on.attach(on.model), foreign(on.routed.spec, BATCH)
        with on.routed.replay(trace):
            expected = on.loss(BATCH)
            for session in (two.replay(trace), two.record()):
                refuses(ReplayError, "attached twice", session.__enter__)
            assert torch.equal(on.loss(BATCH), expected)
        with two.record() as recording:
            if recompute != "none":
                refuses(ReplayError, "attached twice", expected.backward)
            on.loss(BATCH)
        assert recording.trace().num_rows == sum(BATCH.lengths)
        with two.replay(trace):
            assert torch.equal(on.loss(BATCH), expected)


def check_a_model_is_not_attached_and_no_part_of_it_copied_inside_a_session(framework):
    """The routers of a copy would run those of the original."""
    on = framework.built()
    with on.routed.record():
        refuses(AttachError, r"session is.*open", lambda: on.attach(on.model))
        for part in (on.model, *on.routers):
            for copied in (copy.deepcopy, pickle.dumps):
                refuses(ReplayError, r"copied inside", lambda part=part, copied=copied: copied(part))


def check_what_somebody_wraps_inside_a_session_stays_and_still_runs_after_it(framework):
    """Their wrapper keeps ours below it, for good; sessions and native steps go on, each router once."""
    for number in range(len(framework.with_statistics().overridden)):
        # where replayed routes are counted, more is overridden
        on, counts = framework.with_statistics(), "replayed" if number else "native"
        holder, name = on.overridden[number]
        trace, native = foreign(on.routed.spec, UNPADDED), step(on, None, UNPADDED)
        with on.routed.replay(trace, counts=counts):
            expected = on.loss(UNPADDED)
            mine = partial(getattr(holder, name))
            setattr(holder, name, mine)
            assert torch.equal(on.loss(UNPADDED), expected), number
        assert vars(holder)[name] is mine, number
        again = step(on, None, UNPADDED)
        assert torch.equal(native[0], again[0]), number
        assert same(native[1], again[1]), number
        with on.routed.record(weight_version=1) as recording:
            assert torch.equal(replayed(on, trace, UNPADDED, counts=counts), expected), number
        assert recording.trace().equals(trace), number
        assert torch.equal(on.loss(UNPADDED), native[0]), number


def check_a_session_opened_or_closed_in_the_middle_of_a_forward_is_named(framework):
    on = framework.built()
    native = on.loss(BATCH)
    closing, opening = on.routed.record(), on.routed.record()
    closing.__enter__()
    handle = on.layers[2].register_forward_pre_hook(lambda *_: closing.__exit__(None, None, None) or None)
    refuses(ReplayError, r"closed.*middle", lambda: on.run(BATCH))
    handle.remove()
    assert torch.equal(on.loss(BATCH), native)
    handle = on.layers[2].register_forward_pre_hook(lambda *_: opening.__enter__() and None)
    refuses(ReplayError, r"open sessions.*before", lambda: on.run(BATCH))
    handle.remove()
    opening.__exit__(None, None, None)
    assert torch.equal(on.loss(BATCH), native)


def check_a_part_of_the_model_called_alone_is_refused(framework):
    on = framework.built()
    called = []
    handle = on.blocks[0].register_forward_pre_hook(lambda block, *args: called.append(args), with_kwargs=True)
    on.run(BATCH)
    handle.remove()
    [(args, kwargs)] = called
    with on.routed.replay(foreign(on.routed.spec, BATCH)):
        refuses(ReplayError, "ran outside a forward of", lambda: on.blocks[0](*args, **kwargs))
        on.run(BATCH)


def check_a_router_that_is_bypassed_or_runs_twice_is_named(framework):
    on, trace = prepared(framework)
    for column in (0, -1):
        for changed, said in ((on.bypassed, "selected 0 times"), (on.run_twice, "selected 2 times")):
            for session in (on.routed.replay(trace), on.routed.record()):
                with session:
                    with changed(on.blocks[column]):
                        refuses(ReplayError, f"{router_paths(on.routed)[column]} {said}", lambda: on.run(BATCH))
                    on.run(BATCH)


def check_layers_exchanged_after_attach_are_named(framework):
    """Routes would follow the modules; also of layers that are exchanged while a session is open."""
    on, trace = prepared(framework)
    first, third = on.layers[0], on.layers[2]
    for what in ("layers", "blocks"):
        expected = replayed(on, trace, BATCH)

        def exchange(what=what):
            if what == "layers":
                on.layers[0], on.layers[2] = on.layers[2], on.layers[0]
            else:
                first.mlp, third.mlp = third.mlp, first.mlp

        exchange()
        refuses(ReplayError, "(runs behind|stands where) .* Attach again", lambda: replayed(on, trace, BATCH))
        exchange()
        with on.routed.replay(trace):
            exchange()
            refuses(ReplayError, "(runs behind|stands where) .* Attach again", lambda: on.run(BATCH))
            exchange()
            on.run(BATCH)
        assert torch.equal(replayed(on, trace, BATCH), expected)


def check_a_recording_is_what_experts_were_given_in_the_order_of_forwards(framework):
    on = framework.built()
    batches = [batch_of(4, 3, seed=1), batch_of(7, seed=2)]
    with on.routed.record(weight_version=5) as both, torch.no_grad(), on.given() as given:
        for batch in batches:
            fed = batch._replace(ids_BT=batch.ids_BT.clone())
            on.run(fed)
            fed.ids_BT.zero_()  # tokens may be overwritten when the forward is over
    trace = both.trace()
    parts = [recorded(on, batch, weight_version=5) for batch in batches]
    assert trace.equals(concatenate(parts))
    assert trace.versions == (5,)
    assert [trace.tokens(s).tolist() for s in range(3)] == [each.tolist() for b in batches for each in b.sequences]
    for number, each in enumerate(given):
        batch = batches[number // trace.spec.num_layers]
        wanted = map_of(parts[number // trace.spec.num_layers], batch, each.column)
        assert np.array_equal(each.map_BTE & batch.real_BT.numpy()[..., None], wanted)


NOT_VERSIONS = [True, 7.0, "1", [], [None], {1: 2}, torch.tensor(1.0), -2, range(-3, 0)]
VERSIONS = [1, np.int64(1), torch.tensor(1), {0, 1}, np.array([1]), range(10**15)]


def check_values_of_the_wrong_kind_are_refused_by_name_and_leave_no_trace(framework):
    on, trace = prepared(framework)
    on.run(BATCH)
    before = {path: set(vars(module)) for path, module in on.model.named_modules()}
    sessions = {"replay": partial(on.routed.replay, trace), "record": on.routed.record}

    def refused(session, name, given, said):
        refuses(ConfigError, f"{name} is .*expected {said}", entering(sessions[session], **{name: given}))

    for given in NOT_VERSIONS:
        refused("replay", "weight_version", given, "a whole number")
    for given in (True, 1.5, None, [1], -2, 2**31):
        refused("record", "weight_version", given, "a whole number")
    for given in (None, 1, np.array([1, 2])):
        for session, name in (("replay", "telemetry"), ("record", "margins")):
            refused(session, name, given, r"True or.*False")
    for given in (None, [], "x", np.array("native"), True):
        for name in ("missing", "padding", "counts"):
            if (name, given) != ("padding", None):  # which is the framework's own default
                refused("replay", name, given, "one of")
    assert {path: set(vars(module)) for path, module in on.model.named_modules()} == before
    with on.routed.replay(trace, telemetry=np.True_) as session:
        on.run(BATCH)
    assert session.agreement().rows == trace.num_rows


def check_what_is_replayed_is_a_trace_of_this_model(framework):
    on, trace = prepared(framework)
    arrays = trace.expert_ids_NLK, torch.zeros(3)
    for given in (None, "rollout.safetensors", [trace], *arrays, type(trace), on.routed, trace.spec):
        refuses(TraceError, "expected a RoutingTrace", entering(on.routed.replay, given))
    for change in ({"num_experts": 9}, {"top_k": 3}, {"layers": trace.spec.layers[1:]}):
        other = foreign(replace(trace.spec, **change), BATCH)
        refuses(SpecMismatchError, None, entering(on.routed.replay, other))


def check_what_is_attached_is_a_model(framework):
    on = framework.built()
    for given in (None, 1, "Qwen/Qwen3-30B-A3B", [None], type(on.model), on.routed, object()):
        refuses(AttachError, "expected a model", partial(on.attach, given))


def check_every_routed_row_is_of_an_accepted_version(framework):
    """As of a rollout that went on under new weights; one fresh row does not vouch for the others."""
    on, trace = prepared(framework)
    for given in VERSIONS:
        with on.routed.replay(trace, weight_version=given) as session:
            on.run(BATCH)
        assert session.num_forwards == 1
    refused = lambda routes, given, said: refuses(  # noqa: E731
        StaleTraceError, said, entering(on.routed.replay, routes, weight_version=given)
    )
    mixed = replace(trace, weight_versions_N=np.where(np.arange(trace.num_rows) < 5, 1, 2).astype(np.int32))
    for given in (1, 2, [2, 3], range(2, 4)):
        refused(mixed, given, r"weight versions \[1, 2\], expected only")
    replayed(on, mixed, BATCH, weight_version=[1, 2])
    bare = RoutingTrace.unrouted(trace.spec, BATCH.sequences)
    refused(bare, 1, r"weight versions \[\], expected only 1 ")
    # a range reaches below 0 in the first steps, and lets pass no row that states no version
    unstated = trace.with_weight_version(-1)
    refused(unstated, range(-2, 1), r"versions \[-1\], expected only 0 .* --weight-version of.*convert")
    replayed(on, unstated, BATCH, weight_version=-1)
    refused(trace, range(2, 10**12 + 1), r"expected only.*2 to 1000000000000 ")


def check_forwards_of_wrong_values_are_refused_in_replays_and_recordings(framework):
    on, trace = prepared(framework)
    for said, run in on.wrong_calls(BATCH).items():
        for session in (on.routed.replay(trace), on.routed.record()):
            with session:
                refuses(BatchMismatchError, said, run)
                on.run(BATCH)


def check_a_batch_of_other_sequences_is_refused(framework):
    on, trace = prepared(framework)
    rolled = BATCH._replace(ids_BT=torch.where(BATCH.real_BT, BATCH.ids_BT.roll(1, 1).clamp_min(1), 0))
    one_off = BATCH._replace(ids_BT=BATCH.ids_BT.clone())
    one_off.ids_BT[2, 3] += 1
    for batch, said in (
        (BATCH.select(0, 1), "2 sequences"),
        (BATCH.select(1, 0, 2), None),
        (rolled, "sequence 0, position 0|row 0 "),
        (one_off, "sequence 2, position 3|row 11 "),
        (batch_of(8, 6, 4), None),
        (batch_of(9, 7, 4), None),
        (batch_of(9, 5, 4), None),
    ):
        refuses(BatchMismatchError, said, lambda batch=batch: replayed(on, trace, batch))
    replayed(on, trace, BATCH)
