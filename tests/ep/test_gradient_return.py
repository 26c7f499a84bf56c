"""In which order rows, weights and gradients are launched and waited for, on all ranks alike."""

from unittest.mock import patch

import torch.distributed as dist

from foreroute.adapters import hf
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from tests.adapters.hf.model_runs import log_probs
from tests.ep.training import Case, batch, policy
from tests.ep.training_worker import all_rows
from tests.ep.transfer.plans import split_plan
from tests.tiers import grid


class Telling(TransferEngine):
    """Writes down what is sent home and waited for."""

    def __init__(self, homes, options, peers, log):
        super().__init__(homes, options, peers)
        self.log, self.num_fetches, begin = log, 0, self._peers.begin

        def beginning(sends, receives, what):
            self.num_fetches += what.startswith("fetching")
            return begin(sends, receives, what)

        self._peers.begin = beginning

    def fetch(self, cell, home):
        self.log.append(("fetched", cell.layer))
        return super().fetch(cell, home)

    def send_home(self, cell, grads):
        self.log.append(("sent", cell.layer))
        returning = super().send_home(cell, grads)
        wait = returning.wait
        returning.wait = lambda: (self.log.append(("home", cell.layer)), wait())[1]
        return returning


def pass_log(rank, case, frozen, sharing="layer"):
    """What happens in a forward and in a backward pass: what is fetched and sent home, and rows that travel.

    And how many times weights travelled in all.
    """
    model = policy(case)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=20)
    log, all_to_all = [], dist.all_to_all_single
    placed.use(TransferOptions(paths="direct", prefetch=0))
    placed.ranks._engine = weights = Telling(placed.homes, placed.ranks.options, placed._peers, log)
    rows_M = all_rows(routed, case, rank, 0)[:1]
    counts_MLGE = routed.gather_counts(rows_M)
    plans = (split_plan(seed, counts_MLGE, placed.home_LE, sharing=sharing) for seed in range(100))
    plan = next(plan for plan in plans if plan.num_replicas_ML[0].all())
    sending = patch.object(
        dist, "all_to_all_single", lambda *args, **how: log.append("rows") or all_to_all(*args, **how)
    )
    with sending, routed.execute(plan, counts_MLGE, rows_M):
        with routed.replay(rows_M[0]):
            loss = log_probs(model, batch(rank, 0, 0)).sum()
        forward, log[:] = log[:], []
        loss.backward()
    return forward, log, weights.num_fetches


FETCHES = {"layer": 3, "shared": 5}
"""Of three layers. Slots that are kept are filled once. Of one shared set, the last layer finds its own in backward."""


@grid(("frozen", "sharing"), [("nothing", "layer"), ("nothing", "shared"), ("experts.down_proj", "layer")], quick=1)
def test_rows_are_launched_before_weights_and_gradients_before_rows_are_sent_back(workers, frozen, sharing):
    """On one communicator rows would wait behind weights."""
    forward = [event for layer in range(3) for event in ("rows", ("fetched", layer), "rows")]
    backward = [
        event for layer in (2, 1, 0) for event in ("rows", ("fetched", layer), ("sent", layer), "rows", ("home", layer))
    ]
    expected = [(forward, backward, FETCHES[sharing])] * 2
    assert workers(2).run(pass_log, Case(ranks=2, plan=3), frozen, sharing) == expected


@grid("sharing", list(FETCHES), quick=1)
def test_checkpointed_parts_send_theirs_once_and_are_fetched_no_more_often(workers, sharing):
    """The two forward passes of a cell send nothing home. Recomputation and the backward behind it share a fetch."""
    for use_reentrant in (True, False):
        for _, log, num_fetches in workers(2).run(
            pass_log, Case(ranks=2, plan=3, use_reentrant=use_reentrant), "nothing", sharing
        ):
            assert [event for event in log if event[0] in ("sent", "home")] == [
                event for layer in (2, 1, 0) for event in (("sent", layer), ("home", layer))
            ]
            assert num_fetches == FETCHES[sharing]


def test_frozen_experts_send_nothing(workers):
    for _, log, _ in workers(2).run(pass_log, Case(ranks=2, plan=3), ("experts.down_proj", "experts.gate_up_proj")):
        assert [event for event in log if event == "rows" or event[0] in ("sent", "home")] == ["rows"] * 6
