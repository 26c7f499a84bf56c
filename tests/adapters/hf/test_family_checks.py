"""The checks of every family, seen to fail on replay that is wrong in one way each."""

from functools import partial

import pytest
import torch

from foreroute.core import hooks
from foreroute.core.selection import LayerPass, SelectionMode
from foreroute.replay import Recording
from tests.adapters.hf.family_checks import BATCH, attached_once, backends, checkpointing, foreign, native, record
from tests.adapters.hf.model_runs import random_routes
from tests.tiers import grid


@pytest.fixture(autouse=True)
def of_its_own(monkeypatch):
    """No model of a test here is that of another, and attach trusts it, so that the checks have to find out."""
    monkeypatch.setattr("foreroute.core.attaching.self_check", lambda *_: None)
    attached_once.cache_clear()
    yield
    attached_once.cache_clear()


def rows_one_off(patch):
    choose = LayerPass.choose

    def changed(now, own, device):
        ids, own = choose(now, own, device)
        return ids if now.ids_RK is None else ids.roll(1, 0), own

    patch.setattr(LayerPass, "choose", changed)


def changed_values(patch, change):
    """`change` gets the scores at forced ids and returns others."""
    top_k = SelectionMode._top_k

    def changed(mode, *args):
        result = top_k(mode, *args)
        if mode.now is None or mode.now.ids_RK is None or len(mode.seen) != mode.final + 1:
            return result
        return torch.return_types.topk((change(result.values), result.indices))

    patch.setattr(SelectionMode, "_top_k", changed)


weights_by_another_rule = partial(changed_values, change=torch.exp)
routers_without_gradient = partial(changed_values, change=torch.Tensor.detach)


def recomputation_on_its_own(patch):
    patch.setattr(hooks, "bind", lambda *_, **__: None)


def a_recording_of_something_else(patch):
    real = Recording.trace
    patch.setattr(Recording, "trace", lambda self: random_routes(real(self).spec, BATCH))


BROKEN = [
    (rows_one_off, foreign, "qwen3_moe dbrx llama4 jetmoe", AssertionError),
    (rows_one_off, backends, "qwen3_moe", AssertionError),
    (weights_by_another_rule, foreign, "qwen3_moe gpt_oss jetmoe", AssertionError),
    (routers_without_gradient, native, "qwen3_moe", AssertionError),
    (recomputation_on_its_own, checkpointing, "qwen3_moe", RuntimeError),
    (a_recording_of_something_else, record, "qwen3_moe", AssertionError),
]


@grid(
    ("sabotage", "check", "name", "error"),
    [(how, check, name, error) for how, check, names, error in BROKEN for name in names.split()],
    quick=6,
)
def test_broken_replay_fails_its_check(sabotage, check, name, error, monkeypatch):
    sabotage(monkeypatch)
    with pytest.raises(error):
        check(name)
