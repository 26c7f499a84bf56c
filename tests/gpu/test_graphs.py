"""CUDA graphs and sessions. A graph keeps addresses: one captured in a session would repeat its routes for ever.

Captures in a session are refused: tests/adapters/hf/test_on_devices.py. Here are those that were made outside of one.
"""

import copy

import pytest
import torch

from foreroute.adapters import hf
from foreroute.errors import ReplayError
from tests.gpu.bits import Case, distance

pytestmark = pytest.mark.gpu
WARM_UPS = 3
REFUSED = "while a CUDA graph is captured"


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


def test_a_graph_of_a_block_alone_is_refused(case):
    model = copy.deepcopy(case.untouched)
    routed = hf.attach(model)
    shape = (*case.batch["input_ids"].shape, model.config.hidden_size)
    sample = torch.randn(shape, device=model.device, dtype=torch.bfloat16, requires_grad=True)
    try:
        torch.cuda.make_graphed_callables(model.model.layers[1].mlp, (sample,), allow_unused_input=True)
    except RuntimeError as error:
        pytest.skip(f"the unpatched block cannot be captured: {error}")
    for session in (routed.replay(case.foreign), routed.record()):
        refused = pytest.raises(ReplayError, match=r"model\.layers\.1\.mlp\.gate selected 0 times")
        with refused, session, torch.no_grad():
            model(**case.batch, use_cache=False)


class Logits(torch.nn.Module):
    """A model as a function of its tokens alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def test_graphed_callables_made_in_a_session_are_refused(case):
    routed = hf.attach(copy.deepcopy(case.untouched))
    tokens = case.batch["input_ids"][:1].clone()  # the first sequence, which has no padding
    with pytest.raises(ReplayError, match=REFUSED), routed.replay(case.foreign.select([0])):
        torch.cuda.make_graphed_callables(Logits(routed.model), (tokens,), allow_unused_input=True)
