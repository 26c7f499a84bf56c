"""Tiny models that transformers spreads over the ranks of a test, and steps of two micro-batches on them."""

from contextlib import ExitStack

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from foreroute import RoutingTrace
from foreroute.adapters import hf
from foreroute.plan.plan_file import plan_from_bytes, plan_to_bytes
from tests.adapters.hf import model_runs
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, sequences_of, whole
from tests.ep.executor_properties import MICRO_STEPS, PlannedStep
from tests.ep.transfer.plans import split_plan
from tests.replay.session_subject import random_ids

ONE_GROUP = {"fsdp_size": 2, "ep_size": 2}
TWO_GROUPS = {"fsdp_size": 4, "ep_size": 2}
"""Of `DistributedConfig`, on two ranks and on four."""


def load_spread(folder, implementation="foreroute", dtype=torch.float32, *, model_class=AutoModelForCausalLM, **sizes):
    """A folder's model, spread by these sizes of `DistributedConfig`; two ranks with a batch each by default."""
    config = DistributedConfig(**(sizes or ONE_GROUP), ep_implementation=implementation)
    # grouped_mm knows no float64
    how = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return model_class.from_pretrained(folder, dtype=dtype, distributed_config=config, **how).eval()


def sharded(model):
    """Without weights that a forward without a backward has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def gradients(model):
    """By name, whole; and none are left."""
    found = model_runs.gradients(sharded(model))
    model.zero_grad()
    return found


def run(model, batch, *contexts, weigh=None):
    """What the model gives first, and gradients: of the mean loss, or of a number that is made of it."""
    sharded(model).zero_grad()
    labels = {} if weigh else {"labels": batch["input_ids"]}
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        out = model(**batch, **labels, use_cache=False)
        found = whole(out[0] if weigh else out.logits)
        (weigh(found) if weigh else out.loss).backward()
    return found.detach().clone(), gradients(model)


def drawn(spec, number):
    """Micro-batches, padded on either side, of other tokens for each number; last tokens of the second lack routes."""
    batches, traces = [], []
    for m, side in enumerate(("left", "right")):
        batches.append(batch_of(7 + number, 10 - m, seed=10 * m + number, side=side))
        rng, tokens = np.random.default_rng([number, m]), sequences_of(batches[m])
        routes = [random_ids(rng, spec, len(each) - m, favour=1.2) for each in tokens]
        traces.append(RoutingTrace.from_sequences(spec, tokens, routes))
    return batches, traces


class ReplayedStep(PlannedStep):
    """Of a model that is attached, on the micro-batches of a number."""

    def __init__(self, model, number):
        self.model, self.routed = model, hf.attach(model)
        self.batches, self.traces = drawn(self.routed.spec, number)

    def log_probs(self, micro_step, *, replay=True):
        with self.routed.replay(self.traces[micro_step]) if replay else ExitStack():
            return model_runs.log_probs(self.model, self.batches[micro_step])

    def gradients(self):
        return gradients(self.model)

    def passes(self):
        """Log-probs, and gradients of the sum of their means; backward passes follow all forwards."""
        found = [self.log_probs(m) for m in range(MICRO_STEPS)]
        for each in found:
            (-each.mean()).backward()
        return torch.cat(found).detach(), self.gradients()


class SpreadStep(ReplayedStep):
    """Other micro-batches on every rank, but for ranks of tensor parallelism, which share theirs."""

    not_cut = "what is to be replayed is a int"

    def __init__(self, rank, folder, sizes=ONE_GROUP, *, slots=2, checkpointed=False, compiled="", dtype=torch.float32):
        self.rank, model = rank, load_spread(folder, dtype=dtype, **sizes)
        enable_checkpointing(model, use_reentrant=False if checkpointed else None)
        for layer in model.model.layers if compiled else ():
            layer.compile(backend=compiled)
        super().__init__(model, rank // sizes.get("tp_size", 1))
        self.counts_MLGE = self.routed.gather_counts(self.traces)
        self.plan = through_a_file(split_plan(5, self.counts_MLGE, self.routed.home_LE, slots=slots)) if slots else None

    def attach(self):
        return hf.attach(self.model)

    def put_elsewhere(self):
        for each in self.routed.spread.layers[0].experts.parameters():
            each._local_tensor = each._local_tensor.clone()

    def expert_bytes(self):
        return sum(each[0].nbytes for each in self.routed.spread.layers[0].owned.values())


def through_a_file(plan):
    return plan_from_bytes(plan_to_bytes(plan))


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]
