"""`torch.compile` of a replayed model: what eager computes, in as many graphs as without replay, whatever the trace.

The oracle is the same model, eager. Backend `aot_eager` runs what AOTAutograd makes of a graph (its forward and its
backward cut apart, recomputation and mutation included) without waiting for a C++ compiler.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from transformers import StaticCache

from foreroute.adapters import hf
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.testing.models import tiny
from tests.adapters.hf.families import skip_in_older
from tests.adapters.hf.family_checks import is_newest
from tests.adapters.hf.model_runs import (
    CHECKPOINTING,
    batch_of,
    enable_checkpointing,
    gradients,
    loss_of,
    random_routes,
    uneven,
)
from tests.roundings import GRADIENT_TERMS, require_rounded

BATCH = batch_of(9, 6, 4)
OTHER = batch_of(9, 6, 4, seed=5)


pytestmark = pytest.mark.usefixtures("no_graphs_left")


def attached(count=1, *, layers=1, **options):
    models = [tiny(**{"experts": "grouped_mm", "num_hidden_layers": layers, **options}) for _ in range(count)]
    return [hf.attach(model) for model in models]


def graphs():
    return counters["stats"]["unique_graphs"]


def step(routed, call, seed, batch=BATCH, *, inside=True, between=None, **kwargs):
    """Loss, gradients and session of one replayed step; every fourth row is routed by the model, others each time.

    Its backward runs in the session, or behind it, and behind the replay of a batch in `between`.
    """
    routed.model.zero_grad()
    trace = random_routes(routed.spec, batch, seed)
    trace.valid_N[seed % 4 :: 4] = False
    with routed.replay(trace, missing="native", **kwargs) as session:
        loss = loss_of(call, batch)
        if inside:
            loss.backward()
    if between is not None:
        with routed.replay(random_routes(routed.spec, between)), torch.no_grad():
            loss_of(call, between)
    if not inside:
        loss.backward()
    return loss.detach(), plain_gradients(routed.model), session


def plain_gradients(model):
    """By the names of a model that nobody has wrapped."""
    names = ("_orig_mod.", "_checkpoint_wrapped_module.")
    return {name.replace(names[0], "").replace(names[1], ""): g for name, g in gradients(model).items()}


def assert_same(seen, expected):
    require_rounded(seen[0], expected[0])
    assert seen[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        require_rounded(seen[1][name], gradient, GRADIENT_TERMS)


@pytest.mark.shows("Hugging Face", "`torch.compile`, of the model or of layers")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers", "use_reentrant", "attach_first"),
    [
        ("qwen3_moe", 1, None, True),
        pytest.param("qwen3_moe", 2, False, False, marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v3", 2, True, True, marks=pytest.mark.exhaustive),
        pytest.param("uneven", 3, None, True, marks=pytest.mark.exhaustive),
    ],
)
def test_one_graph_replays_every_trace(family, layers, use_reentrant, attach_first):
    """That of several layers each has its own routes is shown layer by layer, and by night."""
    build = uneven if family == "uneven" else partial(tiny, family, num_hidden_layers=layers)
    model, eager = (build(experts="grouped_mm") for _ in range(2))
    eager = hf.attach(eager)
    for each in (model, eager.model):
        enable_checkpointing(each, use_reentrant)
    routed = hf.attach(model) if attach_first else None
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        native = compiled(**BATCH, use_cache=False).logits
    assert graphs() == 1
    routed = routed or hf.attach(compiled)

    for seed, batch in enumerate([BATCH, BATCH, OTHER]):
        assert_same(step(routed, compiled, seed, batch, inside=bool(seed)), step(eager, eager.model, seed, batch))
    assert graphs() == 2, "replay takes one graph more, and no trace another one"

    for seed in range(2):
        with routed.record(native=True) as picked, routed.record(margins=True) as executed:
            seen = step(routed, compiled, seed, telemetry=True)
        with eager.record(native=True) as expected_picked, eager.record(margins=True) as expected_executed:
            expected = step(eager, eager.model, seed, telemetry=True)
        assert_same(seen, expected)
        assert (picked.trace().expert_ids_NLK == expected_picked.trace().expert_ids_NLK).all()
        assert picked.deficits_NL() == pytest.approx(expected_picked.deficits_NL(), rel=1e-4, abs=1e-6, nan_ok=True)
        assert np.nan_to_num(picked.deficits_NL()).any()
        assert executed.margins_NL() == pytest.approx(expected_executed.margins_NL(), rel=1e-3, abs=1e-6)
        assert executed.margins_NL().all()
        ours, theirs = seen[2].agreement(), expected[2].agreement()
        assert (ours.shared_L == theirs.shared_L).all()
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
@pytest.mark.parametrize("use_reentrant", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_compiled_model_with_checkpoints_in_several_graphs_is_refused(use_reentrant):
    [routed] = attached(experts="eager", num_experts=2, num_experts_per_tok=1)  # each expert is a graph
    enable_checkpointing(routed.model, use_reentrant)
    compiled = torch.compile(routed.model, backend="eager")
    said = "selected 0 times.*a checkpoint that torch.compile cannot hold in one graph"
    with pytest.raises(ReplayError, match=said):
        step(routed, compiled, 0, inside=False, between=OTHER)


def compile_each_layer(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def replace_each_layer(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="aot_eager")


def second_by_hand(impl):
    def wrap(model):
        layers = model.train().model.layers
        layers[1] = checkpoint_wrapper(layers[1], checkpoint_impl=impl)

    return wrap


NIGHTLY = [
    (replace_each_layer, CHECKPOINTING["non_reentrant"], False, 1),
    (compile_each_layer, CHECKPOINTING["wrapper_non_reentrant"], True, 1),
    (compile_each_layer, second_by_hand(CheckpointImpl.REENTRANT), True, None),
    (replace_each_layer, second_by_hand(CheckpointImpl.NO_REENTRANT), True, None),
]


@pytest.mark.parametrize(
    ("how", "checkpointing", "attach_first", "count"),
    [
        (compile_each_layer, CHECKPOINTING["plain"], True, 1),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in NIGHTLY),
    ],
)
def test_layers_compiled_one_by_one_share_a_graph(how, checkpointing, attach_first, count):
    untouched, model, eager = (tiny("qwen3_moe", experts="grouped_mm", num_hidden_layers=2) for _ in range(3))
    if not is_newest():
        how(untouched)
        loss_of(untouched, BATCH)
        if graphs() > 1:
            skip_in_older("a layer of this transformers breaks into several graphs")
        torch._dynamo.reset()
        counters.clear()
    eager = hf.attach(eager.train())
    routed = hf.attach(model) if attach_first else None
    if count is None:  # around a layer that is compiled
        how(model)
    checkpointing(model)
    if count is not None:
        how(model)
    routed = routed or hf.attach(model)
    assert graphs() == 0, "attaching compiles nothing"
    for seed in range(2):
        between = None if seed or count else OTHER
        seen = step(routed, model, seed, inside=seed > 0, between=between, telemetry=True)
        expected = step(eager, eager.model, seed, telemetry=True)
        assert_same(seen, expected)
        assert (seen[2].agreement().shared_L == expected[2].agreement().shared_L).all()
    assert count in (None, graphs())


@pytest.mark.slow
def test_a_model_that_breaks_into_many_graphs_is_replayed_too():
    """The eager experts loop over the experts that were hit, which Dynamo cannot trace."""
    routed, eager = attached(2, family="mixtral", experts="eager", num_local_experts=2, num_experts_per_tok=1)
    compiled = torch.compile(routed.model, backend="eager")
    step(routed, compiled, 0)
    before = graphs()
    assert before > 3
    for seed in (1, 2):
        assert_same(step(routed, compiled, seed), step(eager, eager.model, seed))
    assert graphs() == before


@pytest.mark.shows("Hugging Face", "`torch.compile` of several models (a policy and a reference), `dynamic=True`")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "dynamic", "count"),
    [
        ("grouped_mm", True, 2),
        pytest.param("eager", None, 2, marks=pytest.mark.exhaustive),
        pytest.param("eager", True, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_other_models_compiled_in_the_process_are_replayed_too(experts, dynamic, count):
    """A graph names its model by what Dynamo must not make symbolic."""
    *routed, eager = attached(count + 1, experts=experts)
    for seed, each in enumerate(routed):
        compiled = torch.compile(each.model, backend="eager", dynamic=dynamic)
        assert_same(step(each, compiled, seed), step(eager, eager.model, seed))


@pytest.mark.slow
def test_decode_steps_over_a_static_cache_share_a_graph():
    """As `generate` compiles them on a GPU: how many positions the cache holds is no part of the graph."""
    [routed] = attached()
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
    [routed] = attached()
    compiled = torch.compile(routed.model, backend="eager", fullgraph=True)
    step(routed, compiled, 0)
    with (
        pytest.raises(BatchMismatchError, match="sequence 0, position 0"),
        routed.replay(random_routes(routed.spec, OTHER)),
    ):
        compiled(**BATCH, use_cache=False)
    step(routed, compiled, 1)
    routed.model.model.layers[0].mlp.forward = lambda hidden: hidden
    with (
        pytest.raises(ReplayError, match=r"model\.layers\.0\.mlp\.gate selected 0 times"),
        routed.replay(random_routes(routed.spec, BATCH)),
    ):
        compiled(**BATCH, use_cache=False)


@pytest.mark.slow
def test_the_auxiliary_loss_counts_executed_routes_in_a_graph():
    routed, eager = attached(2)
    model = routed.model
    model(**BATCH, output_router_logits=True)  # transformers installs its hooks now, which it cannot in a graph
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    trace = random_routes(routed.spec, BATCH)
    losses = []
    for each, call in ((routed, compiled), (eager, eager.model)):
        with each.replay(trace, counts="replayed"):
            losses.append(call(**BATCH, output_router_logits=True, use_cache=False).aux_loss)
    require_rounded(losses[0], losses[1])
    with routed.replay(trace):
        native = compiled(**BATCH, output_router_logits=True, use_cache=False).aux_loss
    assert (native - losses[0]).abs() > 1e-2


@pytest.mark.slow
def test_a_compiled_forward_whose_positions_say_that_it_continues_is_refused():
    [routed] = attached()
    compiled = torch.compile(routed.model, backend="eager")
    with torch.no_grad(), pytest.raises(BatchMismatchError, match=r"value.*recognised"):
        record_at(routed, compiled, torch.arange(3, 9))
    assert len(record_at(routed, compiled, torch.arange(6))) == 1


def record_at(routed, model, positions):
    with torch.no_grad(), routed.record() as recording:
        model(input_ids=torch.arange(1, 7)[None], position_ids=positions[None])
    return recording.trace()
