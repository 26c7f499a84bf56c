"""What is done to a model after `attach`, or in a session, so that other experts run than those of the routes."""

from contextlib import nullcontext

import pytest
import torch

from foreroute.core import ReplayError, attach
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import tiny
from tests.adapters.hf.families import build
from tests.adapters.hf.model_runs import batch_of, with_routes

BATCH = batch_of(9, 6, 4)


def next_experts(module, args, output):
    return (*output[:2], (output[2] + 1) % 8)


def written_to(module, args, output):
    output[2].add_(1).remainder_(8)


def one_row(module, args, output):
    ids = output[2].clone()
    ids[0] = ids[0] + 1 - 2 * (ids[0] % 2)
    return (*output[:2], ids)


def same_again(module, args, output):
    """As DeepSpeed does: the values are the same, in other tensors."""
    return tuple(part.clone() for part in output)


def put_around(router, change):
    router.forward = lambda *args, run=router.forward: change(router, args, run(*args))


def put_behind(router, change):
    router.register_forward_hook(change)


@pytest.mark.parametrize(
    ("change", "put", "who"),
    [
        (next_experts, put_around, r"function .* its forward\(\)"),
        (written_to, put_behind, r"forward hook \(written_to\)"),
        (one_row, put_behind, r"forward hook \(one_row\)"),
    ],
)
def test_what_rewrites_a_selection_is_named(change, put, who):
    model, routed, trace = with_routes(BATCH)
    put(model.model.layers[1].mlp.gate, change)
    for session, inference in ((routed.replay(trace), torch.no_grad), (routed.record(), torch.inference_mode)):
        said = rf"model\.layers\.1\.mlp\.gate .*{who}.* other ones"
        with pytest.raises(ReplayError, match=said), session, inference():
            model(**BATCH)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "llama4", "jetmoe", "gpt_oss"])
def test_what_is_handed_on_is_read_in_every_form(family):
    """Ids, gates over all experts, one-hot rows, picks by expert: what only copies them is let be."""
    model = build(family)
    routed = attach(model)
    paths = [router.path for router in routed.hooks.routers if router.selecting[1] == "forward"]

    def copied(module, args, output):
        if isinstance(output, torch.Tensor):
            return output.clone()
        return type(output)(part.clone() if isinstance(part, torch.Tensor) else part for part in output)

    for path in paths:
        model.get_submodule(path).register_forward_hook(copied)
    tokens = torch.arange(1, 9)[None]
    with routed.record(), torch.no_grad():
        model(input_ids=tokens)
    if family in ("mixtral", "llama4"):
        model.get_submodule(paths[0]).register_forward_hook(lambda *call: tuple(part.roll(1, -1) for part in call[-1]))
        with pytest.raises(ReplayError, match="other ones"), routed.record(), torch.no_grad():
            model(input_ids=tokens)


def test_a_device_is_asked_and_not_waited_for():
    """What it says is told at the end of a session, or before an optimizer steps."""
    with other_device() as device:
        batch = {name: given.to(DEVICE) for name, given in BATCH.items()}
        model = tiny("qwen3_moe", experts="batched_mm").to(DEVICE)
        routed = attach(model)
        router = model.model.layers[1].mlp.gate
        router.register_forward_hook(same_again)
        device.reads.clear()
        with torch.no_grad():
            model(**batch, use_cache=False)
        native = sum(device.reads.values())
        for change in (None, next_experts):
            if change is not None:
                router.register_forward_hook(change)
            with pytest.raises(ReplayError, match="other ones") if change else nullcontext(), torch.no_grad():
                with routed.record():
                    model(**batch, use_cache=False)
                    device.reads.clear()
                    model(**batch, use_cache=False)
                    assert sum(device.reads.values()) == native
                    device.reads.clear()
                assert sum(device.reads.values()) == 1
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with routed.record():
            model(**batch, use_cache=False)
        with pytest.raises(ReplayError, match="other ones"):
            optimizer.step()


def test_picks_of_another_number_are_named():
    model, routed, trace = with_routes(BATCH)
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 3
    for session in (routed.replay(trace), routed.record()):
        with pytest.raises(ReplayError, match=r"selects 3 experts in 27 of the 27 rows.*expected 2"), session:
            model(**BATCH)
