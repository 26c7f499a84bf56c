"""`torch.compile` on the device: graphs obey every trace, and those that torch captures take the routes of a pass."""

import copy
import importlib.util

import pytest
import torch
from torch._dynamo.utils import counters

from foreroute.adapters import hf
from foreroute.errors import ReplayError
from tests.adapters.hf.family_checks import foreign_routes
from tests.gpu.bits import Case, distance, logits_of, step

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("no_graphs_left")]
NEAR = 5e-2
"""Of logits of the eager model, in bfloat16."""


def has_inductor(device):
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def case_of(family, device):
    return Case.of(family, device, torch.bfloat16, num_hidden_layers=2)


@pytest.mark.exhaustive  # on a CPU tests/adapters/hf/test_compile.py has it by day
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_one_graph_obeys_every_trace(family, device):
    case = case_of(family, device)
    eager, model = hf.attach(case.untouched), case.routed.model
    call = torch.compile(model, backend="inductor" if has_inductor(device) else "aot_eager", fullgraph=True)
    native = logits_of(eager.model, case.batch)
    with eager.record() as recording, torch.no_grad():
        eager.model(**case.batch, use_cache=False)
    graphs = set()
    for trace in (case.foreign, foreign_routes(eager, case.on_host, 2), recording.trace()):
        with eager.replay(trace):
            expected = step(eager.model, case.batch)
        with case.routed.replay(trace), case.routed.record() as executed:
            seen = step(call, case.batch)
        graphs.add(counters["stats"]["unique_graphs"])
        assert executed.trace().equals(trace), "what was executed is not the trace"
        apart = distance(seen["logits"], expected["logits"])
        assert apart < NEAR
        assert distance(joined(seen), joined(expected)) < 0.1
        assert trace is not case.foreign or distance(native, expected["logits"]) > 4 * apart
    assert len(graphs) == 1, "another trace was compiled again"


def joined(found):
    return torch.cat([found[name].flatten() for name in sorted(found) if name != "logits"])


def test_captured_training_steps_take_the_routes_of_their_session(device):
    """Each in a session of its own with routes of its own."""
    if not has_inductor(device):
        pytest.skip("it takes a GPU and triton")
    case = case_of("qwen3_moe", device)
    routed, batch = case.routed, case.batch
    compiled = torch.compile(routed.model, mode="reduce-overhead", fullgraph=True)
    for seed in (1, 2, 3, 4):
        trace = foreign_routes(routed, case.on_host, seed)
        with routed.replay(trace):
            expected = step(routed.model, batch)
        torch.compiler.cudagraph_mark_step_begin()
        with routed.replay(trace, telemetry=True) as session:
            seen = copy.deepcopy(step(compiled, batch))
            shared = session.agreement().overlap_L.mean()
        assert distance(seen["logits"], expected["logits"]) < NEAR
        for name in (name for name in expected if name.endswith("gate.weight")):
            assert distance(seen[name], expected[name]) < 0.2, name
        assert 0 < shared < 1, f"step {seed}: telemetry says that {shared:.2f} of picks are the routers' own"


def test_what_is_generated_over_a_static_cache_is_replayed(device):
    """On a GPU `generate` compiles its steps."""
    case = case_of("qwen3_moe", device)
    routed, prompts = case.routed, case.batch["input_ids"][:2, :6]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with routed.record() as recording:
        sampled = routed.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), cache_implementation="static", **settings
        )
    with routed.replay(recording.rollout(sampled)) as session, torch.no_grad():
        routed.model(input_ids=sampled, use_cache=False)
    assert session.num_forwards == 1


def test_a_graph_captured_before_does_not_pass_for_a_replay_or_a_recording(device):
    if device.type != "cuda":
        pytest.skip("it takes a GPU")
    case = case_of("qwen3_moe", device)
    routed, ids = case.routed, case.batch["input_ids"].clone()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.current_stream()):  # which a failed capture would leave
            with torch.cuda.stream(side):
                native = routed.model(input_ids=ids, use_cache=False).logits
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                logits = routed.model(input_ids=ids, use_cache=False).logits
    except RuntimeError as error:
        pytest.skip(f"the unpatched model cannot be captured: {error}")
    with pytest.raises(ReplayError, match=r"nothing.*replayed"), routed.replay(case.foreign):
        graph.replay()
    with routed.record() as recording:
        graph.replay()
        with pytest.raises(ReplayError, match=r"nothing.*recorded"):
            recording.trace()
    assert distance(logits, native) < NEAR, "the graph is not the model's"
