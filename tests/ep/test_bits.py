"""What is equal bit for bit, on the CPU: everything, to the static placement, but the gradients of split experts."""

import os
import re
from dataclasses import replace

import pytest
import torch

from foreroute.ep import compute
from foreroute.ep.dispatch import RowGroups
from tests.ep import training_worker
from tests.ep.training import MICRO_STEPS, Case, by_expert
from tests.tiers import grid

MODELS = (("qwen3_moe", 2), ("gpt_oss", 4), ("deepseek_v3", 8))
"""Families, and the ranks that they are spread over."""
UNSPLIT = [
    Case(plan="shuffled", use_reentrant=True),
    Case(plan="shuffled"),
    Case(plan="static", use_reentrant=True),
    Case(plan="static", use_reentrant=False),
]
SPLIT = [
    replace(case, dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for case in (
        Case(plan=1),
        Case(plan=2, use_reentrant=False),
        Case(plan=3, weights="shared"),
        Case(plan=4, lora=True),
    )
]


def on_models(cases):
    """Give all cases on two ranks, all but the first in slow tests, as is the first on four; by night all others."""
    for number, each in enumerate(cases):
        for family, ranks in MODELS:
            is_at_once, is_sample = ranks == 2 and number == 0, ranks == 2 or (number == 0 and ranks == 4)
            marks = () if is_at_once else pytest.mark.slow if is_sample else pytest.mark.exhaustive
            case = replace(each, family=family, ranks=ranks)
            yield pytest.param(case, marks=marks, id=case.id)


@pytest.fixture(scope="module")
def static(workers):
    """Under the static placement."""
    found = {}

    def of(case):
        at_home = Case(case.family, case.ranks, plan="static", dtype=case.dtype, lora=case.lora)
        if at_home not in found:
            found[at_home] = workers(case.ranks).run(training_worker.train, at_home)
        return found[at_home]

    return of


@pytest.mark.parametrize("case", list(on_models(UNSPLIT)))
def test_where_no_expert_is_split_losses_gradients_and_weights_are_equal(workers, static, case):
    outcomes = workers(case.ranks).run(training_worker.train, case)
    for outcome, expected in zip(outcomes, static(case), strict=True):
        assert outcome["losses"] == expected["losses"]
        for kind in ("grads", "state"):
            assert [n for n, tensor in expected[kind].items() if not torch.equal(outcome[kind][n], tensor)] == []


@pytest.mark.parametrize("case", list(on_models(SPLIT)))
def test_where_experts_are_split_all_is_equal_but_their_gradients(workers, static, case):
    outcomes = workers(case.ranks).run(training_worker.train, case)
    for outcome, expected in zip(outcomes, static(case), strict=True):
        # the first optimizer step takes up the gradients of split experts
        assert outcome["losses"][:MICRO_STEPS] == expected["losses"][:MICRO_STEPS]
        (split_LE,) = outcome["split"]
        assert split_LE.any()
        experts = sorted({_layer(name) for name in expected["grads"] if ".experts." in name})
        for name, grad in expected["grads"].items():
            differs = outcome["grads"][name] != grad
            if ".mlp.experts." not in name:
                assert not differs.any(), name
            else:
                differs_E = by_expert(name, differs).flatten(1).any(-1)
                assert not (differs_E.numpy() & ~split_LE[experts.index(_layer(name))]).any(), name


def _layer(name):
    return int(re.search(r"layers\.(\d+)\.", name).group(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@grid("is_transposed", [False, True], quick=1)
def test_this_processor_gives_a_row_the_same_bits_in_every_group_of_whole_tiles(dtype, is_transposed):
    if dtype is torch.float32 and os.environ.get("MKL_CBWR") == "AVX2":
        pytest.skip("on some processors these kernels of MKL cut sums by the number of rows: docs/experts.md")
    most, generator = 144, torch.Generator().manual_seed(0)
    sizes = [(32, 32), (96, 48), (384, 128), (1024, 64)]
    if dtype is torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16"):
        sizes.pop()  # AMX cuts the sums of so wide a row by the number of rows, and no multiple of them helps
    for width, inner in sizes:
        rows = torch.randn(most, width, generator=generator).to(dtype)
        weight = torch.randn(1, inner, width, generator=generator).to(dtype)
        weight = weight.transpose(1, 2) if is_transposed else weight.reshape(1, width, inner)
        tile = compute.row_multiple({"down_proj": weight})
        whole = compute._grouped_mm(rows, weight, groups_of(most))
        for n in range(tile, most, tile):
            assert torch.equal(compute._grouped_mm(rows[:n], weight, groups_of(n)), whole[:n]), (width, n)
            assert torch.equal(compute._grouped_mm(rows[-n:], weight, groups_of(n)), whole[-n:]), (width, n)


TILE = 16
"""Rows that a stand-in for a GEMM computes together. A processor whose own GEMM needs no rule shows it too."""


@pytest.mark.slow
def test_kernels_that_compute_leftover_rows_otherwise_are_given_none(workers):
    """The control gives them some, which changes bits."""
    cases = [Case("qwen3_moe", 2, plan=plan) for plan in ("static", "shuffled", 1)]
    differing = []
    for multiple in (compute.ROW_MULTIPLE, {}):
        (expected, *others), *_ = workers(2).run(in_tiles, multiple, cases)
        grads = {name: grad for name, grad in expected["grads"].items() if ".mlp.experts." not in name}
        differing.append(sum(not torch.equal(other["grads"][n], grads[n]) for other in others for n in grads))
    assert differing[0] == 0
    assert differing[1] > 0


def in_tiles(rank, multiple, cases):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "ROW_MULTIPLE", multiple)
        patch.setattr(compute, "_grouped_mm", _by_tiles)
        return [training_worker.train(rank, case) for case in cases]


def groups_of(size):
    return RowGroups([size], torch.tensor([size], dtype=torch.int32))


def _by_tiles(rows, weight, groups):
    """Sums of leftover rows are in float64, and so rounded otherwise."""
    parts = []
    for group, matrix in zip(rows.split(groups.sizes_S), weight.unbind(0), strict=True):
        whole, left = group.split([len(group) - len(group) % TILE, len(group) % TILE])
        parts += [whole @ matrix, (left.double() @ matrix.double()).to(rows.dtype)]
    return torch.cat(parts)


VECTOR = 16
"""Numbers that a stand-in for an activation computes together: a vector of AVX-512 holds so many in float32."""


def test_activations_that_compute_leftover_numbers_otherwise_are_given_none(monkeypatch):
    rows = torch.randn(67, 7, generator=torch.Generator().manual_seed(0))

    def differing(function):
        def activated(n):
            return compute.Activate.apply(rows[:n], torch.ones(n, 1), function)

        return sum(not torch.equal(activated(n), activated(67)[:n]) for n in range(1, 67))

    assert (differing(torch.sigmoid), differing(_sigmoid_by_vectors)) == (0, 0)
    monkeypatch.setattr(compute, "WHOLE_VECTORS", 1)
    assert differing(_sigmoid_by_vectors) > 0


def _sigmoid_by_vectors(rows):
    """Leftover numbers are one unit in the last place off."""
    found = rows.flatten().double().sigmoid().float()
    left = len(found) - len(found) % VECTOR
    found[left:] = found[left:].nextafter(torch.tensor(1.0))
    return found.view_as(rows)
