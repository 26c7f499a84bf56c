"""The checks of every family, seen to fail on replay that is wrong in one way each."""

import importlib

import pytest
import torch

from foreroute.core import hooks
from foreroute.core.selection import LayerPass, SelectionMode
from foreroute.replay import Recording
from tests.adapters.hf.family_checks import (
    attached_once,
    backends,
    checkpointing,
    foreign,
    gradient,
    native,
    record,
    weights,
)
from tests.adapters.hf.model_runs import random_routes


@pytest.fixture(autouse=True)
def of_its_own():
    """No model of a test here is that of another."""
    attached_once.cache_clear()
    yield
    attached_once.cache_clear()


@pytest.fixture
def unchecked(monkeypatch):
    """Attach trusts the model, so that the checks have to find out."""
    attaching = importlib.import_module("foreroute.adapters.hf.attaching")
    monkeypatch.setattr(attaching, "self_check", lambda routed: None)


def changed_ids(monkeypatch, change):
    """`change` gets the ids to run, where routes are forced, and returns others."""
    choose = LayerPass.choose

    def changed(now, own):
        ids, own = choose(now, own)
        return ids if now.ids_RK is None else change(ids), own

    monkeypatch.setattr(LayerPass, "choose", changed)


def changed_values(monkeypatch, change):
    """`change` gets the scores at forced ids and returns others."""
    top_k = SelectionMode._top_k

    def changed(mode, *args):
        result = top_k(mode, *args)
        if mode.now is None or mode.now.ids_RK is None or len(mode.seen) != mode.final + 1:
            return result
        return torch.return_types.topk((change(result.values), result.indices))

    monkeypatch.setattr(SelectionMode, "_top_k", changed)


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "deepseek_v3", "dbrx", "llama4", "jetmoe", "switch_transformers", "zaya"]
)
def test_rows_that_are_off_by_one_are_seen(name, unchecked, monkeypatch):
    changed_ids(monkeypatch, lambda ids: ids.roll(1, 0))
    with pytest.raises(AssertionError):
        foreign(name)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "jetmoe"])
def test_gate_weights_by_another_rule_are_seen(name, unchecked, monkeypatch):
    changed_values(monkeypatch, torch.exp)
    with pytest.raises(AssertionError):
        weights(name)
    with pytest.raises(AssertionError):
        native(name)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_a_router_without_gradient_is_seen(name, unchecked, monkeypatch):
    changed_values(monkeypatch, torch.Tensor.detach)
    with pytest.raises((AssertionError, RuntimeError)):
        gradient(name)


@pytest.mark.parametrize("name", ["deepseek_v2", "unlimited_ocr", "deepseek_ocr2"])
def test_weights_from_scores_that_were_zeroed_are_seen(name, unchecked, monkeypatch):
    monkeypatch.setattr(SelectionMode, "before_masking", lambda self, scores: scores)
    with pytest.raises(AssertionError):
        weights(name)


@pytest.mark.parametrize("name", ["qwen3_moe", "jamba"])
def test_recomputation_on_its_own_is_seen(name, monkeypatch):
    monkeypatch.setattr(hooks, "bind", lambda *_, **__: None)
    with pytest.raises((AssertionError, RuntimeError)):
        checkpointing(name)


@pytest.mark.parametrize("name", ["qwen3_moe", "phimoe", "deepseek_v4"])
def test_a_recording_of_something_else_is_seen(name, unchecked, monkeypatch):
    real = Recording.trace
    batch = {"input_ids": torch.ones(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    monkeypatch.setattr(Recording, "trace", lambda self: random_routes(real(self).spec, batch))
    with pytest.raises(AssertionError):
        record(name)


def test_a_backend_that_is_handed_other_routes_is_seen(unchecked, monkeypatch):
    changed_ids(monkeypatch, lambda ids: ids.roll(1, 0))
    with pytest.raises(AssertionError):
        backends("qwen3_moe")
