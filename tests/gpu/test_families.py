"""Every kind of family: own routes change no bit, foreign ones are what its experts run, under checkpointing too."""

import pytest
import torch

from tests.adapters.hf.model_runs import checkpointed_by_library
from tests.adapters.hf.test_family_checks import routers_without_gradient, rows_one_off
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
    bits.require_obeyed(case)


@pytest.mark.gpu
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_foreign_routes_are_obeyed_in_recomputation(case, use_reentrant):
    """With the backward outside of the session."""
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


def in_autocast(model, batch):
    with torch.autocast(batch["input_ids"].device.type, torch.bfloat16):
        done = bits.forward(model, batch)
    return bits.backward(model, done)


@pytest.mark.gpu
def test_routes_are_obeyed_in_mixed_precision(device):
    case = Case.of("qwen3_moe", device, torch.float32)
    bits.require_native_bits(case, in_autocast)
    bits.require_obeyed(case, in_autocast, torch.bfloat16)


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


@pytest.mark.parametrize(
    ("sabotage", "check"), [(rows_one_off, bits.require_obeyed), (routers_without_gradient, bits.require_native_bits)]
)
def test_broken_replay_fails(monkeypatch, sabotage, check):
    case = Case.of("qwen3_moe", torch.device("cpu"), torch.float32)
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        check(case)
