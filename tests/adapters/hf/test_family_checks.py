"""The checks of every family, seen to fail on replay that is wrong in one way each."""

import importlib

import pytest
import torch

from foreroute.core import hooks
from foreroute.core.selection import LayerPass, SelectionMode
from foreroute.replay import Recording
from tests.adapters.hf.family_checks import BATCH, attached_once, backends, checkpointing, foreign, native, record
from tests.adapters.hf.model_runs import random_routes


@pytest.fixture(autouse=True)
def of_its_own(monkeypatch):
    """No model of a test here is that of another, and attach trusts it, so that the checks have to find out."""
    attaching = importlib.import_module("foreroute.core.attaching")
    monkeypatch.setattr(attaching, "self_check", lambda *_: None)
    attached_once.cache_clear()
    yield
    attached_once.cache_clear()


def rows_one_off(patch):
    choose = LayerPass.choose

    def changed(now, own, device):
        ids, own = choose(now, own, device)
        return ids if now.ids_RK is None else ids.roll(1, 0), own

    patch.setattr(LayerPass, "choose", changed)


def routers_without_gradient(patch):
    top_k = SelectionMode._top_k

    def detached(mode, *args):
        result = top_k(mode, *args)
        return torch.return_types.topk((result.values.detach(), result.indices))

    patch.setattr(SelectionMode, "_top_k", detached)


def recomputation_on_its_own(patch):
    patch.setattr(hooks, "bind", lambda *_, **__: None)


def a_recording_of_something_else(patch):
    real = Recording.trace
    patch.setattr(Recording, "trace", lambda self: random_routes(real(self).spec, BATCH))


BROKEN = [
    (rows_one_off, foreign, "qwen3_moe dbrx llama4 jetmoe"),
    (rows_one_off, backends, "qwen3_moe"),
    (routers_without_gradient, foreign, "gpt_oss"),
    (routers_without_gradient, native, "qwen3_moe"),
    (recomputation_on_its_own, checkpointing, "qwen3_moe"),
    (a_recording_of_something_else, record, "qwen3_moe"),
]


@pytest.mark.parametrize(
    ("sabotage", "check", "name"), [(how, check, name) for how, check, names in BROKEN for name in names.split()]
)
def test_broken_replay_fails_its_check(sabotage, check, name, monkeypatch):
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError) if check is not record else AssertionError):
        check(name)
