"""Every kind of family: own routes change no bit, foreign ones are what its experts run, under checkpointing too.

The negative controls at the end are broken for other batches than the eight tokens with which attaching proves replay.
"""

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from foreroute.core import hooks, selection
from foreroute.core.probe import PROBE_TOKENS
from foreroute.core.selection import LayerPass
from tests.adapters.hf.model_runs import checkpointed_by_library
from tests.gpu import bits
from tests.gpu.bits import FAMILIES, Case

EXPERTS = ("grouped_mm", "eager", "batched_mm")
BY_DAY = ("qwen3_moe", "deepseek_v3", "phimoe")
"""On a CPU in CI, where tests/adapters/hf has all families in `make test`; the others by night."""
pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[family if family in BY_DAY else pytest.param(family, marks=pytest.mark.exhaustive) for family in FAMILIES],
)
def family(request):
    return request.param


@pytest.fixture(
    scope="module",
    params=[torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)],
    ids=["bfloat16", "float32"],
)
def case(request, family, device):
    yield Case.of(family, device, request.param)
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(params=EXPERTS)
def experts(request, case):
    """The implementation of the experts, where the unpatched model runs with it."""
    case.use(request.param)
    try:
        bits.step(case.untouched, case.batch)
    except Exception as error:  # kernels may lack for any reason
        pytest.skip(f"the unpatched model does not run with {request.param} here: {error}")
    else:
        yield
    finally:
        case.use(EXPERTS[0])


@pytest.mark.gpu
def test_own_routes_change_no_bit(case, experts):
    bits.require_native_bits(case)


@pytest.mark.gpu
def test_foreign_routes_are_obeyed(case, experts):
    found = bits.require_obeyed(case)
    bits.require_live_routers(case, found)
    bits.require_other_outcome(case, found)


@pytest.mark.gpu
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_foreign_routes_are_obeyed_in_recomputation(case, use_reentrant):
    """With the backward outside of the session."""
    require_checkpointing(case, use_reentrant)


def require_checkpointing(case, use_reentrant):
    routed, batch = case.routed, case.batch
    with routed.replay(case.foreign):
        plain = bits.step(routed.model.train(), batch)
    checkpoint(routed.model, use_reentrant)
    try:
        with bits.given_to_experts(case) as (calls, of_experts):
            with routed.replay(case.foreign):
                done = bits.forward(routed.model, batch)
            ours = bits.backward(routed.model, done)
        num_layers = routed.spec.num_layers
        assert len(calls) == 2 * num_layers, "each layer runs twice"
        bits.require_given(case, calls[:num_layers], of_experts)
        bits.require_given(case, calls[: num_layers - 1 : -1], [])
    finally:
        routed.model.gradient_checkpointing_disable()
        routed.model.eval()
    if changed := bits.differing(plain, ours):  # sums may be taken in another order, as they are without replay
        unsteady = changed_without_replay(case, use_reentrant)
        assert changed <= unsteady, f"{sorted(changed - unsteady)} differ from those without checkpointing"
        assert all(bits.distance(ours[name], plain[name]) < 2e-2 for name in changed)


def checkpoint(model, use_reentrant):
    try:
        checkpointed_by_library(model.train(), {"use_reentrant": use_reentrant})
    except ValueError as error:
        model.eval()
        pytest.skip(f"transformers does not checkpoint it: {error}")


def changed_without_replay(case, use_reentrant):
    model, batch = case.untouched, case.batch
    expected = bits.step(model.train(), batch)
    changed = bits.differing(expected, bits.step(model, batch))
    checkpoint(model, use_reentrant)
    changed |= bits.differing(expected, bits.step(model, batch))
    model.gradient_checkpointing_disable()
    model.eval()
    return changed


@pytest.mark.exhaustive
def test_the_sizes_for_a_gpu_make_sound_models(monkeypatch):
    """Small ones run on CPUs; these would be seen on a GPU for the first time."""
    monkeypatch.setattr(bits, "SIZES", bits.WIDE)
    for family in FAMILIES:
        case = Case.of(family, torch.device("cpu"), torch.float32)
        bits.require_obeyed(case)


@pytest.fixture(scope="module")
def sound():
    """On the CPU, for the controls."""
    return Case.of("qwen3_moe", torch.device("cpu"), torch.float32)


def ignoring_the_trace(patch):
    choose = LayerPass.choose

    def own(now, picked, device):
        ids_RK, own_RK = choose(now, picked, device)
        if picked is None:  # it was not asked: all rows have a route
            own_RK = ids_RK.flip(0)
        return (ids_RK if len(own_RK) == PROBE_TOKENS else own_RK), own_RK

    patch.setattr(LayerPass, "choose", own)


def rounding_gate_weights(patch):
    select = hooks.SelectingRouter.select

    def rounded(router, now, *args, **kwargs):
        logits, weights, ids = select(router, now, *args, **kwargs)
        kept = len(now.into_RK) == PROBE_TOKENS or now.rows is None
        return (logits, weights if kept else weights.bfloat16().float(), ids)

    patch.setattr(hooks.SelectingRouter, "select", rounded)


def forcing_without_gradient(patch):
    top_k = selection.SelectionMode._top_k

    def detached(mode, *args):
        result = top_k(mode, *args)
        return torch.return_types.topk((result.values.detach(), result.indices))

    patch.setattr(selection.SelectionMode, "_top_k", detached)


def recomputing_natively(patch):
    patch.setattr(hooks, "bind", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("sabotage", "check"),
    [
        (ignoring_the_trace, bits.require_obeyed),
        (rounding_gate_weights, bits.require_native_bits),
        (forcing_without_gradient, bits.require_native_bits),
        (recomputing_natively, lambda case: require_checkpointing(case, use_reentrant=False)),
    ],
)
def test_broken_replay_fails(sound, monkeypatch, sabotage, check):
    check(sound)
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, CheckpointError)):
        check(sound)
