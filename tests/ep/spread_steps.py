"""A model that is spread over the ranks of a test, and a step of two micro-batches for it."""

import torch

from foreroute.adapters import hf
from foreroute.plan.plan_file import plan_from_bytes, plan_to_bytes
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, gradients, log_probs, random_routes
from tests.ep.executor_properties import LAYERS as LAYERS
from tests.ep.executor_properties import MICRO_STEPS, PlannedStep
from tests.ep.spread_models import load_spread, sharded
from tests.ep.transfer.plans import split_plan

ONE_GROUP = {"fsdp_size": 2, "ep_size": 2}
TWO_GROUPS = {"fsdp_size": 4, "ep_size": 2}
"""Of `DistributedConfig`, on two ranks and on four."""


class SpreadStep(PlannedStep):
    """A model, and what this rank replays on it; other tokens and lengths on every rank, padded on either side."""

    not_cut = "what is to be replayed is a int"

    def __init__(self, rank, folder, sizes=ONE_GROUP, *, slots=2, checkpointed=False, compiled="", dtype=torch.float32):
        self.rank, self.model = rank, load_spread(folder, dtype=dtype, **sizes)
        if checkpointed:
            enable_checkpointing(self.model, use_reentrant=False)
        if compiled:
            for layer in self.model.model.layers:
                layer.compile(backend=compiled)
        self.routed = hf.attach(self.model)
        self.batches = [
            batch_of(7 + rank, 10 - m, seed=10 * m + rank, side=("left", "right")[m]) for m in range(MICRO_STEPS)
        ]
        self.traces = [random_routes(self.routed.spec, batch, seed=rank + m) for m, batch in enumerate(self.batches)]
        self.counts_MLGE = self.routed.gather_counts(self.traces)
        self.plan = through_a_file(split_plan(5, self.counts_MLGE, self.routed.home_LE, slots=slots)) if slots else None

    def attach(self):
        return hf.attach(self.model)

    def log_probs(self, micro_step, *, replay=True):
        if not replay:
            return log_probs(self.model, self.batches[micro_step])
        with self.routed.replay(self.traces[micro_step]):
            return log_probs(self.model, self.batches[micro_step])

    def gradients(self):
        found = gradients(sharded(self.model))
        self.model.zero_grad()
        return found

    def put_elsewhere(self):
        for each in self.routed.spread.layers[0].experts.parameters():
            each._local_tensor = each._local_tensor.clone()

    def expert_bytes(self):
        return sum(each[0].nbytes for each in self.routed.spread.layers[0].owned.values())


def through_a_file(plan):
    return plan_from_bytes(plan_to_bytes(plan))


def weights(routed):
    return {name: tensor.clone() for name, tensor in routed.gather_weights()}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
