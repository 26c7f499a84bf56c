"""`torch.compile` of a replayed model: what eager computes, in as many graphs as without replay, whatever the trace.

Backend `aot_eager` runs what AOTAutograd makes of a graph without waiting for a C++ compiler.
"""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import StaticCache

from foreroute.adapters import hf
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.testing.models import tiny
from tests.adapters.hf.family_checks import is_newest
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, gradients, loss_of, random_routes
from tests.roundings import GRADIENT_TERMS, require_rounded

BATCH, OTHER = batch_of(9, 6, 4), batch_of(9, 6, 4, seed=5)
pytestmark = pytest.mark.usefixtures("no_graphs_left")


def attached(count, layers=1):
    return [hf.attach(tiny("qwen3_moe", experts="grouped_mm", num_hidden_layers=layers)) for _ in range(count)]


def graphs():
    return counters["stats"]["unique_graphs"]


def step(routed, call, seed, batch=BATCH, *, inside=True, **kwargs):
    """Loss, gradients and session, with backward inside or behind; every fourth row is the model's own."""
    routed.model.zero_grad()
    trace = random_routes(routed.spec, batch, seed)
    trace.valid_N[seed % 4 :: 4] = False
    with routed.replay(trace, missing="native", **kwargs) as session:
        loss = loss_of(call, batch)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return loss.detach(), gradients(routed.model), session


def assert_same(seen, expected):
    require_rounded(seen[0], expected[0])
    assert seen[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        require_rounded(seen[1][name], gradient, GRADIENT_TERMS)


@pytest.mark.shows("Hugging Face", "`torch.compile`, of the model or of layers")
@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [None, True])
def test_one_graph_replays_every_trace(use_reentrant):
    """That each of several layers has its own routes is shown layer by layer."""
    routed, eager = attached(2)
    for each in (routed, eager):
        enable_checkpointing(each.model, use_reentrant)
    compiled = torch.compile(routed.model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        native = compiled(**BATCH, use_cache=False).logits
    assert graphs() == 1
    for seed, batch in enumerate([BATCH, OTHER]):
        assert_same(step(routed, compiled, seed, batch, inside=bool(seed)), step(eager, eager.model, seed, batch))
    assert graphs() == 2, "replay takes one graph more, and no trace another one"

    with routed.record(native=True) as picked, routed.record(margins=True) as executed:
        seen = step(routed, compiled, 1, telemetry=True)
    with eager.record(native=True) as expected_picked, eager.record(margins=True) as expected_executed:
        expected = step(eager, eager.model, 1, telemetry=True)
    assert_same(seen, expected)
    assert (picked.trace().expert_ids_NLK == expected_picked.trace().expert_ids_NLK).all()
    assert picked.deficits_NL() == pytest.approx(expected_picked.deficits_NL(), rel=1e-4, abs=1e-6, nan_ok=True)
    assert executed.margins_NL() == pytest.approx(expected_executed.margins_NL(), rel=1e-3, abs=1e-6)
    assert executed.margins_NL().all()
    assert (seen[2].agreement().shared_L == expected[2].agreement().shared_L).all()
    assert (seen[2].expert_counts_LE() == expected[2].expert_counts_LE()).all()
    assert graphs() == 3

    with routed.record() as recording, torch.no_grad():
        compiled(**BATCH, use_cache=False)
    with eager.record() as expected_recording, torch.no_grad():
        eager.model(**BATCH, use_cache=False)
    assert recording.trace().equals(expected_recording.trace())
    with torch.no_grad():
        assert torch.equal(compiled(**BATCH, use_cache=False).logits, native), "the session left a graph behind"
    assert graphs() == 4


@pytest.mark.slow
def test_a_compiled_model_with_checkpoints_in_several_graphs_is_refused():
    [routed] = attached(1)
    block = routed.model.model.layers[0].mlp
    block.forward = lambda hidden, run=block.forward: (torch._dynamo.graph_break(), run(hidden))[1]
    enable_checkpointing(routed.model, True)
    compiled = torch.compile(routed.model, backend="eager")
    with pytest.raises(ReplayError, match=r"selected 0 times.*torch\.compile"):
        step(routed, compiled, 0, inside=False)


def test_layers_compiled_one_by_one_share_a_graph():
    routed, eager = attached(2, layers=2)
    for layer in routed.model.train().model.layers:
        layer.compile(backend="aot_eager")
    eager.model.train()
    for seed in range(2):
        seen = step(routed, routed.model, seed, inside=seed > 0, telemetry=True)
        expected = step(eager, eager.model, seed, telemetry=True)
        assert_same(seen, expected)
        assert (seen[2].agreement().shared_L == expected[2].agreement().shared_L).all()
    assert graphs() == 1 or not is_newest()


@pytest.mark.shows("Hugging Face", "`torch.compile` of several models (a policy and a reference), `dynamic=True`")
@pytest.mark.slow
def test_other_models_compiled_in_the_process_are_replayed_too():
    *routed, eager = attached(3)
    for seed, each in enumerate(routed):
        compiled = torch.compile(each.model, backend="eager", dynamic=True)
        assert_same(step(each, compiled, seed), step(eager, eager.model, seed))


@pytest.mark.slow
def test_decode_steps_over_a_static_cache_share_a_graph():
    """As `generate` compiles them on a GPU: how many positions the cache holds is no part of the graph."""
    [routed] = attached(1)
    model, tokens = routed.model.eval(), batch_of(7, 7)["input_ids"]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with routed.record() as recording, torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=12)
        for first, last, call in ((0, 4, model), (4, 5, compiled), (5, 6, compiled), (6, 7, compiled)):
            positions = torch.arange(first, last)[None]
            call(input_ids=tokens[:, first:last], position_ids=positions, past_key_values=cache)
    assert graphs() == 1
    with routed.record() as whole, torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    seen, expected = (np.sort(each.trace().expert_ids_NLK) for each in (recording, whole))
    assert np.array_equal(seen, expected)


@pytest.mark.slow
def test_a_compiled_forward_checks_its_batch_and_its_routers():
    [routed] = attached(1)
    compiled = torch.compile(routed.model, backend="eager", fullgraph=True)
    own, other = (random_routes(routed.spec, batch) for batch in (BATCH, OTHER))
    step(routed, compiled, 0)
    with pytest.raises(BatchMismatchError, match="sequence 0, position 0"), routed.replay(other):
        compiled(**BATCH, use_cache=False)
    step(routed, compiled, 1)
    routed.model.model.layers[0].mlp.forward = lambda hidden: hidden
    with pytest.raises(ReplayError, match=r"model\.layers\.0\.mlp\.gate selected 0 times"), routed.replay(own):
        compiled(**BATCH, use_cache=False)
