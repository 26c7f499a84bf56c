"""A plan that is executed in one pass, and at homes in the other: bits, what travels, and what is counted."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.plan.options import PASS_NAMES
from tests.ep.spread_steps import MICRO_STEPS, SpreadStep
from tests.ep.transfer.plans import loads_MLG
from tests.tiers import grid


def counting(what, name, log):
    """Calls of a method, written down by its name."""
    method = getattr(what, name)
    return patch.object(what, name, lambda *args, **more: log.append(name) or method(*args, **more))


def run(s, pass_name):
    """Log-probs, and in an update the gradients, of all micro-steps."""
    with torch.set_grad_enabled(pass_name == "update"):
        found = [s.log_probs(m) for m in range(MICRO_STEPS)]
    if pass_name == "update":
        for each in found:
            each.sum().backward()
    return [each.detach() for each in (*found, *s.gradients().values())]


def two_stages(rank, folder, paths, gains):
    """By pass: whether bits are those of known splits alone, what was called, and loads planned and executed."""
    s = SpreadStep(rank, folder)
    s.routed.use(TransferOptions(paths=paths))
    plan, found = replace(s.plan, gains=gains, priced_paths=paths), {}
    for pass_name in PASS_NAMES:
        log = []
        with s.execute(None, step=6):
            static = run(s, pass_name)
        with (
            counting(TransferEngine, "fetch", log),
            counting(TransferEngine, "return_grads", log),
            counting(HostMemory, "_write", log),
            s.execute(plan, step=7) as execution,
        ):
            ours = run(s, pass_name)
        served_ML = loads_MLG(plan.in_pass(pass_name), s.counts_MLGE)[..., rank]
        found[pass_name] = {
            "same": len(ours) == len(static) and all(map(torch.equal, ours, static)),
            "called": log,
            "transfers": len(execution.transfers),
            "as served": np.array_equal(execution.executed_ML, served_ML),
        }
    s.routed.close()
    return found


@grid(
    ("paths", "gains"),
    [
        ("host", {"recompute": 0.3, "update": 0.0099}),
        ("host", {"recompute": 0.0099, "update": 0.3}),
        ("direct", {"recompute": -1.0, "update": 0.3}),
        ("host", {"recompute": 0.0, "update": 0.0}),
    ],
    quick=1,
    day=3,
)
def test_a_stage_at_home_moves_nothing_and_is_static_bit_for_bit(workers, folder_of, paths, gains):
    published = [pass_name for pass_name in PASS_NAMES if gains[pass_name] >= 0.01][:1] if paths == "host" else []
    for of_rank in workers(2).run(two_stages, folder_of(), paths, gains):
        for pass_name, seen in of_rank.items():
            assert seen["as served"]
            assert seen["called"].count("_write") == (pass_name in published)
            if gains[pass_name] < 0.01:
                assert seen["same"]
                assert (seen["called"], seen["transfers"]) == ([], 0)
            else:
                assert "fetch" in seen["called"]
                assert ("return_grads" in seen["called"]) == (pass_name == "update")
