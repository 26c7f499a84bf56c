"""One model, several threads: a session belongs to the thread that opened it, and the others are told by name."""

import threading

import torch

from foreroute.errors import ReplayError
from tests.replay.session_subject import batch_of, entering, prepared, recorded, replayed, same, step

BATCH = batch_of()


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
