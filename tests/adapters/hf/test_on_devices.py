"""What jobs on a GPU bring: captures, memory that CUDA graphs use again, weights that are kept elsewhere.

There is no GPU here. What torch says during a capture is made up, and a compiled model writes its notes to the same
addresses in every pass, as one in a CUDA graph does. `benchmarks/gpu` does the same on a GPU.
"""

from contextlib import contextmanager

import pytest
import torch

from foreroute.adapters import hf
from foreroute.adapters.hf.model import TransformerHooks
from foreroute.errors import ReplayError
from foreroute.testing.models import tiny
from tests.adapters.hf.model_runs import batch_of, log_probs, random_routes

BATCH = batch_of(9, 6, 4)


@pytest.fixture(autouse=True)
def no_graphs_left():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextmanager
def capturing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def native(model):
    with torch.no_grad():
        return log_probs(model, BATCH)


@pytest.mark.parametrize(
    ("session", "compiled"),
    [("replay", False), ("record", False), ("replay", True), pytest.param("record", True, marks=pytest.mark.slow)],
)
def test_a_capture_in_a_session_is_refused_and_leaves_nothing_behind(session, compiled):
    model = tiny("qwen3_moe", experts="grouped_mm")
    routed = hf.attach(model)
    call = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    before = native(model)
    trace = random_routes(routed.spec, BATCH)
    with routed.replay(trace) if session == "replay" else routed.record() as opened:
        expected = native(call)
        named = "Qwen3MoeModel runs in a session while a CUDA graph is captured"
        with pytest.raises(ReplayError, match=named), capturing():
            native(call)
        assert torch.equal(native(call), expected)
    assert session == "replay" or len(opened.trace()) == 2 * len(trace)
    with capturing():
        native(model)
    assert torch.equal(native(model), before)


@pytest.mark.slow
def test_notes_of_a_compiled_pass_stay_when_the_next_one_writes_over_its_memory(monkeypatch):
    model = tiny("qwen3_moe", experts="grouped_mm")
    routed = hf.attach(model)
    end = TransformerHooks.end_from_graph

    def written_over(hooks, calls_L, kept):
        end(hooks, calls_L, kept)
        for tensor in kept:
            tensor.zero_()

    monkeypatch.setattr(TransformerHooks, "end_from_graph", written_over)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    traces = [random_routes(routed.spec, BATCH, seed) for seed in (1, 2)]
    recordings = []
    for trace in traces:
        with routed.replay(trace), routed.record() as recording:
            native(compiled)
        recordings.append(recording)
    assert [recording.trace().equals(trace) for recording, trace in zip(recordings, traces, strict=True)] == [True] * 2


@pytest.mark.parametrize("attach_first", [True, False])
def test_weights_that_accelerate_offloads_are_attached_before_or_after(attach_first):
    cpu_offload = pytest.importorskip("accelerate").cpu_offload
    plain, model = hf.attach(tiny("qwen3_moe")), tiny("qwen3_moe")
    routed = hf.attach(model) if attach_first else None
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.get_input_embeddings().weight.is_meta
    routed = routed or hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    results = []
    for each in (plain, routed):
        with each.replay(trace), each.record() as recording:
            results.append(native(each.model))
        assert recording.trace().equals(trace)
    assert torch.equal(*results)
    assert not torch.equal(native(model), results[0])
