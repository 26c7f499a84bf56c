"""What runs again in backward: the routes of its own forward, whatever is in flight by then, in any thread."""

import gc
import threading
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from foreroute.errors import ReplayError
from tests.replay.session_subject import (
    batch_of,
    entering,
    foreign,
    prepared,
    recorded,
    refuses,
    replayed,
    require_followed,
    same,
    step,
)

BATCH = batch_of()
SCHEDULES = ("ABba", True), ("ABab", False), ("AaBb", True)
"""Forwards are capital and their backwards small; whether these run inside of another session."""
WHOLE = {f"whole model by hand, {name}": form for name, form in {"reentrant": True, "non-reentrant": False}.items()}


def check_micro_batches_in_flight_keep_their_own_routes(framework):
    """Bits of one after the other, without recomputation; those of different micro-batches differ."""
    batches = {"A": batch_of(9, 6, seed=1), "B": batch_of(5, 8, seed=2)}
    other = batch_of(3, 3, seed=7)
    alone = framework.built()
    traces = {name: foreign(alone.routed.spec, batch, ord(name)) for name, batch in batches.items()}
    expected = {name: step(alone, traces[name], batch) for name, batch in batches.items()}
    assert not same(expected["A"][1], expected["B"][1])
    for recompute in (*framework.recomputations, *WHOLE):
        on = framework.built(recompute=recompute if recompute in framework.recomputations else "none")
        loss_of = loss_in_a_checkpoint(on, WHOLE[recompute]) if recompute in WHOLE else on.loss
        for order, is_inside in SCHEDULES[: None if recompute in framework.recomputations[:4] else 2]:
            losses = {}
            for letter in order:
                name = letter.upper()
                if letter == name:
                    with on.routed.replay(traces[name]):
                        losses[name] = loss_of(batches[name])
                        with torch.no_grad():
                            on.run(batches[name])
                    continue
                on.model.zero_grad(set_to_none=True)
                with on.routed.replay(foreign(alone.routed.spec, other)) if is_inside else nullcontext():
                    on.run(other)
                    losses[name].backward()
                assert torch.equal(losses[name].detach(), expected[name][0])
                assert same(on.gradients(), expected[name][1]), (recompute, order, is_inside, name)


def loss_in_a_checkpoint(on, use_reentrant):
    anchor = torch.zeros(1, requires_grad=True)
    return lambda batch: checkpoint(lambda zero: on.loss(batch) + zero, anchor, use_reentrant=use_reentrant)[0]


def check_a_backward_of_native_routes_in_a_session_is_refused(framework):
    """Its recomputation could take the routes of another batch; so it does not run at all."""
    for recompute in framework.recomputations[1:3]:
        on = framework.built(recompute=recompute)
        native = on.loss(BATCH)
        with on.routed.replay(foreign(on.routed.spec, BATCH)):
            on.run(BATCH)
            refuses(ReplayError, "outside a forward", native.backward)


def check_a_recomputation_gives_experts_what_the_forward_gave_them(framework):
    """In rows without a route and in padding too, though a router would pick others by then. Recorded once."""
    for padding, is_other_by_then in (("native", False), ("spread", False), ("native", True)):
        gradients = []
        for recompute in framework.recomputations:
            on = framework.built(recompute=recompute)
            trace = foreign(on.routed.spec, BATCH, absent=[(0, 2), (1, 0), (2, 3)])
            with on.given() as given:
                with on.routed.replay(trace, missing="native", padding=padding), on.routed.record() as recording:
                    loss = on.loss(BATCH)
                    first = {each.column: each for each in given}
                    assert len(given) == len(first) == trace.spec.num_layers
                    for router in on.routers if is_other_by_then else ():
                        router.weight.data.neg_()
                    loss.backward()
                again = given[len(first) :]
            assert bool(again) == (recompute != "none"), recompute
            require_followed(first.values(), trace, BATCH)
            for each in again:
                assert (each.map_BTE == first[each.column].map_BTE).all(), recompute
                same_weights = (each.weights_BTE == first[each.column].weights_BTE).all()
                assert same_weights != is_other_by_then, recompute
            assert recording.trace().num_rows == sum(BATCH.lengths)
            gradients.append(on.gradients())
        assert is_other_by_then or all(same(gradients[0], each) for each in gradients[1:])


def check_a_frozen_model_is_replayed_with_gradients_on_or_off(framework):
    """A reference model has nothing to recompute, whatever its configuration says."""
    for recompute in framework.recomputations[:3]:
        on, trace = prepared(framework, recompute=recompute)
        expected = replayed(on, trace, BATCH)
        on.model.requires_grad_(False)
        assert torch.equal(replayed(on, trace, BATCH), expected)
        next(reversed(list(on.model.parameters()))).requires_grad_(True)
        assert torch.equal(replayed(on, trace, BATCH), expected)


class CountingTopK(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.topk.default
        return function(*args, **(kwargs or {}))


def check_a_recomputation_selects_nothing_anew(framework):
    """Nobody asks what a router would pick by then, and what runs is what the forward kept."""
    for recompute in framework.recomputations[1:]:
        on, trace = prepared(framework, recompute=recompute)
        with on.routed.replay(trace, telemetry=True), CountingTopK() as selections:
            loss = on.loss(BATCH)
            of_forward = selections.count
            loss.backward()
        assert selections.count == of_forward >= trace.spec.num_layers, recompute


def rows_alive(trace):
    """Addresses of the tensors that Python holds with an id for each row, layer and pick."""
    slots, top_k = BATCH.ids_BT.numel() * trace.spec.num_layers * trace.spec.top_k, trace.spec.top_k
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    held = [each for each in tensors if not each.is_floating_point() and each.dtype != torch.bool]
    return {id(each) for each in held if each.ndim and each.shape[-1] == top_k and each.numel() >= slots}


def check_rows_are_let_go_with_the_graph_that_recomputes_on_them(framework):
    """Not at some later time, when Python looks for cycles: they are on the GPU."""
    for recompute in framework.recomputations[:3]:
        on, trace = prepared(framework, recompute=recompute)
        step(on, trace, BATCH, telemetry=True)  # what is made once in a process stays
        gc.collect()
        gc.disable()
        try:
            before = rows_alive(trace)
            with on.routed.replay(trace, telemetry=True):
                loss = on.loss(BATCH)
                assert rows_alive(trace) - before, "the check must be able to see rows"
                loss.backward()
            del loss
            assert not rows_alive(trace) - before, recompute
        finally:
            gc.enable()


def in_thread(function):
    """What the function returned, or raised, in a thread of its own."""
    outcomes = []

    def run():
        try:
            outcomes.append(function())
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=run, name="other")
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return outcomes[0]


def require_refused(outcome):
    assert isinstance(outcome, ReplayError), outcome
    assert "thread 'other'" in str(outcome)
    assert "fused" not in str(outcome)


def check_forwards_and_sessions_of_another_thread_are_refused_while_one_is_open(framework):
    on, trace = prepared(framework)
    for session in (on.routed.replay(trace), on.routed.record()):
        with session:
            expected = on.loss(BATCH)
            for refused in (lambda: on.loss(BATCH), entering(on.routed.record), entering(on.routed.replay, trace)):
                outcome = in_thread(refused)
                require_refused(outcome)
                assert f"thread {threading.current_thread().name!r}" in str(outcome)
            assert torch.equal(on.loss(BATCH), expected)
        in_thread(lambda: on.loss(BATCH)).backward()
    assert torch.equal(in_thread(lambda: replayed(on, trace, BATCH)), replayed(on, trace, BATCH))


def check_a_session_opened_in_the_middle_of_another_threads_forward_names_both(framework):
    """That forward began without a session, and would else take part in this one from its second layer on."""
    on = framework.built()
    alone = recorded(on, BATCH)
    started, opened, outcome = threading.Event(), threading.Event(), []

    def wait(*_):
        if threading.current_thread().name == "other" and not started.is_set():
            started.set()
            assert opened.wait(60)

    handle = on.layers[1].register_forward_pre_hook(wait)
    waiting = threading.Thread(target=lambda: outcome.append(in_thread(lambda: on.loss(BATCH))), name="starts it")
    waiting.start()
    assert started.wait(60)
    with on.routed.record() as recording:
        second = on.layers[2].register_forward_pre_hook(
            lambda *_: opened.set() or (threading.current_thread().name != "other" and waiting.join(60)) or None
        )
        on.loss(BATCH)
        second.remove()
    handle.remove()
    require_refused(outcome[0])
    assert recording.trace().equals(alone)


def check_a_backward_of_another_thread_recomputes_its_own_routes(framework):
    """Autograd of a GPU runs recomputations in threads of its own."""
    for recompute in framework.recomputations:
        on, trace = prepared(framework, recompute=recompute)
        _, expected = step(on, trace, BATCH)
        on.model.zero_grad(set_to_none=True)
        with on.routed.replay(trace):
            loss = on.loss(BATCH)
            assert in_thread(loss.backward) is None
        assert same(on.gradients(), expected), recompute


def check_two_threads_that_share_a_model_never_blame_a_kernel(framework):
    """Each forward is right or refused by the names of the threads, whatever the moments at which they meet."""
    on = framework.built()
    alone, outcomes = recorded(on, BATCH), []

    def record():
        try:
            outcomes.append(recorded(on, BATCH))
        except Exception as error:
            outcomes.append(error)

    other = threading.Thread(target=lambda: [record() for _ in range(12)], name="other")
    other.start()
    for _ in range(12):
        record()
    other.join(60)
    refused = [each for each in outcomes if isinstance(each, ReplayError) and "thread '" in str(each)]
    right = [each for each in outcomes if not isinstance(each, Exception) and each.equals(alone)]
    assert right
    assert len(right) + len(refused) == len(outcomes) == 24, outcomes
