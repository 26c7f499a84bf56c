"""In which order rows, weights and gradients are launched and waited for, on all ranks alike."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch.distributed as dist

from foreroute.adapters import hf
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from tests.adapters.hf.model_runs import log_probs
from tests.ep.replica_steps import drawn
from tests.ep.spread_models import load_spread
from tests.ep.transfer.plans import split_plan
from tests.tiers import grid

FETCHES = {"layer": 3, "shared": 5}
"""Of three layers. Slots that are kept are filled once. Of one shared set, the last layer finds its own in backward."""


def telling(log):
    """Writes down, while it is open, rows that travel, and what is fetched, sent home and waited for."""
    all_to_all, post = dist.all_to_all_single, PeerGroup.post
    fetch, return_grads = TransferEngine.fetch, TransferEngine.return_grads

    def fetching(engine, cell):
        log.append(("fetched", cell.layer))
        return fetch(engine, cell)

    def sending(engine, cell, grads):
        log.append(("sent", cell.layer))
        returning = return_grads(engine, cell, grads)
        wait = returning.wait
        returning.wait = lambda: (log.append(("home", cell.layer)), wait())[1]
        return returning

    def posting(peers, sends, receives, what):
        log.extend(["travels"] * what.startswith("fetching"))
        return post(peers, sends, receives, what)

    stack = ExitStack()
    for of, name, put in (
        (dist, "all_to_all_single", lambda *args, **how: log.append("rows") or all_to_all(*args, **how)),
        (TransferEngine, "fetch", fetching),
        (TransferEngine, "return_grads", sending),
        (PeerGroup, "post", posting),
    ):
        stack.enter_context(patch.object(of, name, put))
    return stack


def pass_log(rank, folder, frozen, slots="layer"):
    """What happens in a forward and in a backward pass; and how often weights travelled."""
    model = load_spread(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    routed = hf.attach(model)
    routed.use(TransferOptions(paths="direct", prefetch=0))
    batch, trace = drawn(routed.spec, rank)[0]
    counts_MLGE = routed.gather_counts([trace])
    plans = (split_plan(seed, counts_MLGE, routed.home_LE, sharing=slots) for seed in range(100))
    plan, log = next(plan for plan in plans if plan.num_replicas_ML[0].all()), []
    with routed.execute(plan, counts_MLGE, [trace]), telling(log):
        with routed.replay(trace):
            loss = log_probs(model, batch).sum()
        forward, log[:] = log[:], []
        loss.backward()
    passes = [[event for event in each if event != "travels"] for each in (forward, log)]
    return *passes, (forward + log).count("travels")


@pytest.mark.slow
@grid(("frozen", "slots"), [("nothing", "layer"), ("nothing", "shared"), ("experts.down_proj", "layer")], quick=1)
def test_rows_are_launched_before_weights_and_gradients_before_rows_are_sent_back(workers, folder_of, frozen, slots):
    """On one communicator rows would wait behind weights."""
    forward = [event for layer in range(3) for event in ("rows", ("fetched", layer), "rows")]
    backward = [
        event for layer in (2, 1, 0) for event in ("rows", ("fetched", layer), ("sent", layer), "rows", ("home", layer))
    ]
    expected = [(forward, backward, FETCHES[slots])] * 2
    assert workers(2).run(pass_log, folder_of(), frozen, slots) == expected


@pytest.mark.slow
def test_frozen_experts_send_nothing(workers, folder_of):
    for _, log, *_ in workers(2).run(pass_log, folder_of(), ("experts.down_proj", "experts.gate_up_proj")):
        assert [event for event in log if event == "rows" or event[0] in ("sent", "home")] == ["rows"] * 6
