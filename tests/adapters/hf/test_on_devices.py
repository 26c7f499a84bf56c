"""What jobs on a GPU bring: captures, memory that CUDA graphs use again, weights that are kept elsewhere.

Without a GPU, what torch says during a capture is made up, and so are addresses that a graph writes to in every pass.
"""

from contextlib import contextmanager

import pytest
import torch

from foreroute import core
from foreroute.adapters import hf
from foreroute.adapters.hf.routed_transformer import TransformerHooks
from foreroute.errors import ReplayError
from foreroute.testing.models import tiny
from tests.adapters.hf.families import skip_in_older
from tests.adapters.hf.model_runs import batch_of, forced_by_hand, log_probs, random_routes
from tests.roundings import require_rounded

BATCH = batch_of(9, 6, 4)
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_graphs_left")


@contextmanager
def capturing(device):
    """A capture on a GPU; elsewhere what torch says during one."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def native(model, device=CPU):
    with torch.no_grad():
        return log_probs(model, {name: each.to(device) for name, each in BATCH.items()})


@pytest.mark.shows(
    "Hugging Face",
    "capture of a CUDA graph in a session",
    refused="a graph would replay the routes that it was captured with",
)
@pytest.mark.gpu
@pytest.mark.parametrize("session", ["replay", "replay with telemetry", "record"])
def test_a_capture_in_a_session_is_refused_and_leaves_nothing_behind(session, device):
    model = tiny("qwen3_moe", experts="grouped_mm").to(device)
    routed = hf.attach(model)
    before = native(model, device)
    trace = random_routes(routed.spec, BATCH)
    telemetry = session == "replay with telemetry"
    with routed.record() if session == "record" else routed.replay(trace, telemetry=telemetry) as opened:
        expected = native(model, device)
        with pytest.raises(ReplayError, match=r"Qwen3MoeModel.*CUDA graph"), capturing(device):
            native(model, device)
        assert torch.equal(native(model, device), expected)
    assert session != "record" or len(opened.trace()) == 2 * len(trace)
    if device.type == "cpu":  # outside of a session nothing is refused; a GPU captures in tests/gpu/test_compiled.py
        with capturing(device):
            native(model, device)
    assert torch.equal(native(model, device), before)


@pytest.mark.slow
def test_notes_of_a_compiled_pass_stay_when_the_next_one_writes_over_its_memory(monkeypatch):
    model = tiny("qwen3_moe", experts="grouped_mm", num_hidden_layers=1)
    routed = hf.attach(model)
    end = TransformerHooks.end_from_graph

    def written_over(hooks, calls_L, kept):
        end(hooks, calls_L, kept)
        for tensor in kept:
            tensor.zero_()

    monkeypatch.setattr(TransformerHooks, "end_from_graph", written_over)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    recordings = []
    for call in (model, compiled):
        with routed.record(margins=True) as recording:
            native(call)
        recordings.append(recording.margins_NL())
    assert recordings[0] == pytest.approx(recordings[1], rel=1e-3, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("attach_first", [True, False])
def test_weights_that_accelerate_offloads_are_attached_before_or_after(attach_first, device):
    cpu_offload = pytest.importorskip("accelerate").cpu_offload
    plain, model = hf.attach(tiny("qwen3_moe").to(device)), tiny("qwen3_moe").to(device)
    before = hf.attach(model) if attach_first else None
    cpu_offload(model, execution_device=device)
    assert model.get_input_embeddings().weight.is_meta
    routed = before or hf.attach(model)
    trace = random_routes(routed.spec, BATCH)
    results = []
    for each in (plain, routed):
        with each.replay(trace), each.record() as recording:
            results.append(native(each.model, device))
        assert recording.trace().equals(trace)
    assert torch.equal(*results)
    assert not torch.equal(native(model, device), results[0])


@pytest.mark.shows(
    "Hugging Face",
    "`device_map` with layers on the CPU or on the disk (all of them: from release 5.13), accelerate's `cpu_offload`",
)
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_weights_that_are_kept_elsewhere_are_there_again_afterwards(place, tmp_path):
    pytest.importorskip("accelerate")
    plain = tiny("qwen3_moe")
    plain.save_pretrained(tmp_path / "model")
    model = type(plain).from_pretrained(tmp_path / "model", device_map={"": place}, offload_folder=tmp_path / "weights")
    if place == "disk" and not hasattr(model, "_hf_hook"):
        skip_in_older("this transformers brings no weight back from the disk where all are there")

    def weights():
        return [(name, each.device, each.shape) for name, each in model.named_parameters()]

    before = weights()
    assert any(each.is_meta for each in model.parameters()) == (place != "cpu")
    core.attach(model)
    routed = hf.attach(model)
    assert weights() == before
    with routed.record() as recording:
        expected = native(model)
    with routed.replay(recording.trace()):
        assert torch.equal(native(model), expected)
    trace = random_routes(routed.spec, BATCH)
    with forced_by_hand(plain, trace, BATCH):
        expected = native(plain)
    with routed.replay(trace):
        require_rounded(native(model), expected)
    assert not torch.allclose(native(model), expected, atol=0.1), "the control: its own routes are others"
    assert weights() == before
