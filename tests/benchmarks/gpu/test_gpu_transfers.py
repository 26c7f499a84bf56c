"""The parts about transfers and planning see what they are to see."""

import time
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import expert_parallel, planning, transfers
from benchmarks.gpu.expert_parallel import Outcome
from benchmarks.gpu.part import Part
from foreroute.ep.transfer.host_memory import HostMemory

CPU = torch.device("cpu")
WHOLE = "experts arrive whole in their slots"
SAME = "the same plan on every number of threads"


@pytest.fixture
def part(tmp_path):
    return Part("one", CPU, False, time.monotonic() + 300, tmp_path / "one.json")


def test_a_host_path_that_copies_is_passed_and_timed(part):
    with transfers.group_of_one(CPU):
        transfers.copies(part)
    assert part.checks[WHOLE] == "passed"
    assert part.checks["shared memory is page-locked"] == "skipped: only copies to a GPU need it"
    assert {"host_path_ratio", "hidden_share"} <= set(part.figures)


def test_a_host_path_that_fills_other_bytes_fails(part, monkeypatch):
    row = HostMemory.row
    monkeypatch.setattr(HostMemory, "row", lambda self, source, layer, name, i: row(self, source, layer, name, i // 2))
    with transfers.group_of_one(CPU):
        transfers.copies(part)
    assert part.checks[WHOLE].startswith(
        "failed: AssertionError: a burst of 8 experts: slots [0, 1, 2, 3, 4, 5, 6] of "
    )


def test_a_plan_that_depends_on_the_number_of_threads_fails(part, monkeypatch):
    plan = planning.plan

    def unsteady(counts, topology, options):
        return plan(counts, topology, replace(options, tolerance=0.1 if options.threads == 2 else 0.02))

    monkeypatch.setattr(planning, "plan", unsteady)
    planning.run(part)
    wrong = [name for name, outcome in part.checks.items() if outcome != "passed"]
    assert wrong == [SAME, f"{SAME}, homes planned too"]
    assert part.checks[SAME].startswith("failed: AssertionError: the plan on 1 threads is ")


@pytest.mark.parametrize("kind", ["logits", "grads"])
def test_outputs_and_gradients_that_differ_fail(kind):
    expected = Outcome([torch.ones(3)], {"weight": torch.ones(2)})
    expert_parallel.require_close(Outcome([torch.ones(3) + 1e-6], {"weight": torch.ones(2)}), expected)
    wrong = {"logits": [torch.tensor([1, 1, 1.01])], "grads": {"weight": torch.tensor([1, 1.01])}}
    found = replace(expected, **{kind: wrong[kind]})
    with pytest.raises(AssertionError, match=r"differ by 1\.00e-02 of the largest value"):
        expert_parallel.require_close(found, expected)
