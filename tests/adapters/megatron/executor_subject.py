"""Models of Megatron-Core on two ranks, as the properties of executed plans take them."""

from unittest import mock

import torch
import torch.distributed as dist

from foreroute.adapters import megatron
from tests.adapters.megatron import executed_plans
from tests.adapters.megatron.executed_plans import Planned
from tests.adapters.megatron.grid import Cell, ExecutionCase
from tests.adapters.megatron.micro_batches import model_inputs
from tests.adapters.megatron.model_chunks import initialize
from tests.adapters.megatron.training_step import gradients, moe_layers
from tests.ep.executor_properties import LAYERS, MICRO_STEPS, PlannedStep, failures
from tests.ep.transfer.plans import split_plan


class MegatronStep(PlannedStep):
    variants = ({}, {"experts": "grouped"})
    not_cut = "micro-batch 1 is a int"

    def __init__(self, *, checkpointed=False, dtype=torch.float32, experts="sequential"):
        case = ExecutionCase(
            Cell(ep=2, layers=LAYERS, recompute="uniform" if checkpointed else "none", experts=experts)
        )
        at = Planned(case.in_float64() if dtype == torch.float64 else case)
        [self.model], self.rank, self.routed = at.chunks, dist.get_rank(), at.routed
        self.batches, self.traces = at.batches[:MICRO_STEPS], at.shards[:MICRO_STEPS]
        self.counts_MLGE = self.routed.gather_counts(self.traces)
        self.plan = split_plan(5, self.counts_MLGE, self.routed.home_LE)

    def attach(self):
        return megatron.attach([self.model])

    def log_probs(self, micro_step, *, replay=True):
        inputs, _ = model_inputs(self.batches[micro_step])
        if not replay:
            return -self.model(**inputs)
        with self.routed.replay(self.traces[micro_step]):
            return -self.model(**inputs)

    def gradients(self):
        found = gradients([self.model])
        self.model.zero_grad(set_to_none=True)
        return found

    def put_elsewhere(self):
        for module in moe_layers([self.model])[0].experts.modules():
            for name, each in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(each.detach().clone()))

    def expert_bytes(self):
        return sum(each.nbytes for each in moe_layers([self.model])[0].experts.local_experts[0].parameters())

    def left_alone(self):
        return [(block.token_dispatcher, dict(block.__dict__)) for block in moe_layers([self.model]).values()]


def failures_here(asked):
    initialize(Cell(ep=2))
    with mock.patch.object(executed_plans, "initialize"):  # it would give up the groups of models that are kept
        return failures(MegatronStep, asked)
