"""CUDA graphs and sessions. A graph keeps addresses: one captured in a session would repeat its routes for ever.

Captures in a session are refused: tests/adapters/hf/test_on_devices.py. Here are those that were made outside of one.
"""

import pytest
import torch

from foreroute.errors import ReplayError
from tests.gpu.bits import Case, distance

pytestmark = pytest.mark.gpu
WARM_UPS = 3


@pytest.fixture(scope="module")
def case(device):
    if device.type != "cuda":
        pytest.skip("it takes a GPU")
    return Case.of("qwen3_moe", device, torch.bfloat16)


def test_a_graph_captured_before_does_not_pass_for_a_replay_or_a_recording(case):
    routed = case.routed
    graph, logits, ids = graph_of(routed.model, case.batch["input_ids"])
    with torch.no_grad():
        native = routed.model(input_ids=ids, use_cache=False).logits
    with pytest.raises(ReplayError, match=r"nothing.*replayed"), routed.replay(case.foreign):
        graph.replay()
    with routed.record() as recording:
        graph.replay()
        with pytest.raises(ReplayError, match=r"nothing.*recorded"):
            recording.trace()
    torch.cuda.synchronize()
    assert distance(logits, native) < 5e-2, "the graph is not the model's"


def graph_of(model, tokens):
    """A graph of the whole model outside of any session, its logits, and the tokens that it reads."""
    ids = tokens.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.current_stream()):  # which a failed capture would leave
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    model(input_ids=ids, use_cache=False)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                logits = model(input_ids=ids, use_cache=False).logits
    except RuntimeError as error:
        pytest.skip(f"the unpatched model cannot be captured: {error}")
    graph.replay()
    return graph, logits, ids
