"""One model, several threads: a session belongs to the thread that opened it, and the others are told by name."""

import threading

import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import ReplayError
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, gradients, loss_of, random_routes

BATCH = batch_of(9, 6, 4)


def in_thread(function, name="other"):
    """What the function returned, or raised, in a thread of its own."""
    outcome = []

    def run():
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return outcome[0]


@pytest.fixture
def routed():
    return hf.attach(tiny("qwen3_moe"))


def test_a_forward_in_another_thread_is_refused_and_the_session_goes_on(routed):
    trace = random_routes(routed.spec, BATCH)
    for session in (routed.replay(trace), routed.record()):
        with session:
            expected = loss_of(routed.model, BATCH)
            error = in_thread(lambda: loss_of(routed.model, BATCH))
            assert isinstance(error, ReplayError)
            assert "thread 'other'" in str(error)
            assert f"thread {threading.current_thread().name!r}" in str(error)
            assert "fused" not in str(error)
            assert torch.equal(loss_of(routed.model, BATCH), expected)
        in_thread(lambda: loss_of(routed.model, BATCH)).backward()


def test_a_session_in_another_thread_is_refused_while_one_is_open(routed):
    trace = random_routes(routed.spec, BATCH)

    def record():
        with routed.record() as recording:
            loss_of(routed.model, BATCH)
        return recording.trace()

    with routed.replay(trace):
        loss_of(routed.model, BATCH)
        error = in_thread(record)
        assert isinstance(error, ReplayError)
        assert "thread 'other' opens a session" in str(error)
    assert in_thread(record).equals(record())


def test_a_session_opened_in_the_middle_of_another_threads_forward_names_both(routed):
    """That forward began without a session, and would else take part in this one from its second layer on."""
    started, opened = threading.Event(), threading.Event()
    model = routed.model

    def wait(*_):
        if threading.current_thread().name == "other" and not started.is_set():
            started.set()
            assert opened.wait(60)

    model.model.layers[1].register_forward_pre_hook(wait)
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(in_thread_error(model)), name="other")
    thread.start()
    assert started.wait(60)
    with routed.record() as recording:
        handle = model.model.layers[2].register_forward_pre_hook(lambda *_: opened.set() or thread.join(60))
        loss_of(model, BATCH)
        handle.remove()
    assert isinstance(outcome[0], ReplayError)
    assert "thread 'other'" in str(outcome[0])
    with routed.record() as alone:
        loss_of(model, BATCH)
    assert recording.trace().equals(alone.trace())


def in_thread_error(model):
    try:
        return loss_of(model, BATCH)
    except ReplayError as error:
        return error


def test_a_backward_of_another_thread_recomputes_its_own_routes(checkpointing):
    """Autograd of a GPU runs recomputations in threads of its own."""
    model = tiny("qwen3_moe")
    enable_checkpointing(model, checkpointing)
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with routed.replay(trace):
        loss_of(model, BATCH).backward()
    expected = gradients(model)
    model.zero_grad(set_to_none=True)
    with routed.replay(trace):
        loss = loss_of(model, BATCH)
        assert in_thread(loss.backward) is None
    assert all(torch.equal(expected[name], grad) for name, grad in gradients(model).items())


def test_a_recomputation_in_the_middle_of_another_threads_forward_is_refused():
    model = tiny("qwen3_moe")
    enable_checkpointing(model, False)
    routed = hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    with routed.replay(trace):
        loss = loss_of(model, BATCH)
    outcome = []
    handle = model.model.layers[1].register_forward_pre_hook(
        lambda *_: outcome or outcome.append(in_thread(loss.backward))
    )
    with routed.replay(trace), torch.no_grad():
        model(**BATCH)
    handle.remove()
    assert isinstance(outcome[0], ReplayError)
    assert "thread 'other'" in str(outcome[0])


def test_two_models_in_two_threads_keep_to_their_own_traces():
    def train(routed):
        traces = [random_routes(routed.spec, BATCH, step) for step in range(4)]
        losses = []
        for trace in traces:
            with routed.replay(trace):
                losses.append(loss_of(routed.model, BATCH).item())
        return losses

    models = [hf.attach(tiny("qwen3_moe", seed=seed)) for seed in (1, 2)]
    alone = [train(routed) for routed in models]
    together = [None, None]
    threads = [threading.Thread(target=lambda i=i: together.__setitem__(i, train(models[i]))) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone


def test_two_threads_that_share_a_model_never_blame_a_kernel(routed):
    """Each forward is right or refused by the names of the threads, whatever the moments at which they meet."""
    model, outcomes = routed.model, []
    with routed.record() as alone:
        loss_of(model, BATCH)

    def work():
        for _ in range(12):
            try:
                with routed.record() as recording:
                    loss_of(model, BATCH)
                outcomes.append(recording.trace())
            except ReplayError as error:
                outcomes.append(error)

    threads = [threading.Thread(target=work, name=f"worker {i}") for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for outcome in outcomes:
        if isinstance(outcome, ReplayError):
            assert "thread 'worker" in str(outcome)
        else:
            assert outcome.equals(alone.trace())
    assert any(not isinstance(outcome, ReplayError) for outcome in outcomes)
    loss_of(model, BATCH)
