"""The parts `bits` and `jobs` of the GPU proof fail where replay is broken, and say what they cannot know.

Attaching proves replay on eight tokens; what is broken here is broken for other batches alone.
"""

import time
from unittest import mock

import pytest
import torch

from benchmarks.gpu.bits import Case, Look, check_checkpointing, check_experts
from benchmarks.gpu.driving import step
from benchmarks.gpu.families import FAMILIES, build
from benchmarks.gpu.jobs_graphs import check_captures
from benchmarks.gpu.part import Part, Skipped
from foreroute.adapters import hf
from foreroute.core import hooks
from foreroute.core import selection as hf_selection
from foreroute.core.find import PROBE_TOKENS
from foreroute.core.selection import LayerPass

NAME = "qwen3_moe/float32/grouped_mm"


@pytest.fixture
def part(tmp_path):
    return Part("bits", torch.device("cpu"), False, time.monotonic() + 600, tmp_path / "bits.json")


def failed(part):
    return {name for name, outcome in part.checks.items() if outcome != "passed"}


def all_checks(part):
    case = Case.made(part, "qwen3_moe", "float32")
    check_experts(part, case, "grouped_mm")
    check_checkpointing(part, case, use_reentrant=False)
    check_captures(part, case)


def test_sound_replay_passes(part):
    all_checks(part)
    assert len(part.checks) == 10
    assert not failed(part)


def test_experts_that_cannot_run_here_are_left_behind_nowhere(part):
    case = Case.made(part, "qwen3_moe", "float32")
    check_experts(part, case, "no such kernel")
    assert part.checks["qwen3_moe/float32/no such kernel/unpatched"].startswith("skipped")
    step(case.untouched, case.batch)


@pytest.mark.slow
def test_the_sizes_for_a_gpu_make_sound_models(part):
    """Small ones run on CPUs; these would be seen on a GPU for the first time."""
    for family in FAMILIES:
        hf.attach(build(family, part.device, torch.float32, full=True, experts="grouped_mm"))


def ignoring_the_trace(patch):
    choose = LayerPass.choose

    def own(now, picked):
        ids_RK, own_RK = choose(now, picked)
        return (ids_RK if len(own_RK) == PROBE_TOKENS else own_RK), own_RK

    patch.setattr(LayerPass, "choose", own)


def rounding_gate_weights(patch):
    select = hooks.SelectingRouter.select

    def rounded(router, now, *args, **kwargs):
        logits, weights, ids = select(router, now, *args, **kwargs)
        kept = len(now.own_RK) == PROBE_TOKENS or now.rows is None
        return (logits, weights if kept else weights.bfloat16().float(), ids)

    patch.setattr(hooks.SelectingRouter, "select", rounded)


def forcing_without_gradient(patch):
    top_k = hf_selection.SelectionMode._top_k

    def detached(mode, *args):
        result = top_k(mode, *args)
        return torch.return_types.topk((result.values.detach(), result.indices))

    patch.setattr(hf_selection.SelectionMode, "_top_k", detached)


def recomputing_natively(patch):
    patch.setattr(hooks, "bind", lambda *_, **__: None)


def capturing_what_is_replayed(patch):
    begin = hooks.ModelHooks.begin

    def unguarded(model_hooks, args):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False):
            return begin(model_hooks, args)

    patch.setattr(hooks.ModelHooks, "begin", unguarded)


@pytest.mark.parametrize(
    ("sabotage", "seen_by"),
    [
        (ignoring_the_trace, f"{NAME}/foreign routes obeyed"),
        (rounding_gate_weights, f"{NAME}/own routes, logits"),
        (forcing_without_gradient, f"{NAME}/own routes, gradients"),
        (recomputing_natively, f"{NAME}/checkpointing, not reentrant"),
        (capturing_what_is_replayed, "CUDA graph/a capture in replay is refused"),
    ],
)
def test_broken_replay_fails(part, monkeypatch, sabotage, seen_by):
    sabotage(monkeypatch)
    all_checks(part)
    assert part.checks[seen_by].startswith("failed")
    assert part.outcome.startswith("failed")


def test_bits_that_the_unpatched_model_does_not_repeat_are_held_against_nobody(part):
    """But those that it repeats are."""
    case = Case.made(part, "qwen3_moe", "float32")
    calls = []

    def noisy(model, batch):
        calls.append(model)
        bits = step(model, batch)
        return bits | {"lm_head.weight": bits["lm_head.weight"] + len(calls)}

    look = Look(case, noisy(case.untouched, case.batch), noisy)
    look.take()
    look.require_same({"logits"})
    with pytest.raises(Skipped, match=r"does not repeat its own bits here: lm_head\.weight"):
        look.require_same(look.names)
