"""Training with plans that are executed, and the same training with every expert at home: what there is to compare."""

import contextlib
import itertools

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from foreroute.adapters import megatron
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.peers import gather_objects
from foreroute.plan import Links, PlanOptions, Topology
from foreroute.plan.options import SlotSharing
from foreroute.planner import plan
from foreroute.trace import digest
from tests.adapters.megatron.cpu_optimizers import Trained, finalize_model_grads, install
from tests.adapters.megatron.grid_checks import carrying
from tests.adapters.megatron.micro_batches import layout_of, made_up, make_batches
from tests.adapters.megatron.model_chunks import EXPERTS, build, initialize
from tests.adapters.megatron.training_step import forward_step, moe_layers, step
from tests.plan.random_plans import random_plan

STEPS = 2
"""The second one trains on weights that a plan has trained."""
SLOTS = 2
LINKS = Links(4e9, 1e9, 2e9, 1e-5, 5e-5)


class Planned:
    """A case before its first step: its chunks, also in DDP with an optimizer, and of a plan all that it is made of."""

    def __init__(self, case, optimizer=None):
        self.chunks, self.routed = built(case)
        self.model = optimizer and Trained(self.chunks, optimizer)
        self.batches, self.traces, self.shards = drawn(self.routed, case, 0)
        self.plan, self.counts_MLGE, _ = make_plan(self.routed, self.model, "planned", 0, self.shards, None)

    def execute(self):
        return self.routed.execute(self.plan, self.counts_MLGE, self.shards)

    def step(self):
        chunks = self.model.chunks if self.model else self.chunks
        return step(chunks, carrying(self.batches, self.shards), self.routed.replaying(forward_step))


def trained(case, planned, steps=STEPS, path="direct"):
    """So many steps of a case: losses, weights with the optimizer's state, routes, and what was executed.

    `planned` is "static", "planned", or "random", which also moves homes; None for Megatron as it is, "moved" for the
    same with homes elsewhere from every other step on.
    """
    chunks, routed = built(case)
    routed.use(TransferOptions(paths=path))
    model = Trained(chunks, case.optimizer, **case.told)
    if case.told.get("overlap_grad_reduce"):
        of_chunks = [chunk.no_sync for chunk in model.chunks]
        chunks[0].config.no_sync_func = of_chunks if len(of_chunks) > 1 else of_chunks[0]
    forward = routed.replaying(forward_step, padding=case.padding) if case.replays else forward_step
    executes = planned not in (None, "moved")
    found = {"losses": [], "traces": [], "off_plan": 0, "replicas": 0, "moved": 0}
    for number in range(steps):
        model.zero_grad()
        before_LE = routed.home_LE
        if planned == "moved" and number % 2:
            routed.move_homes(np.random.default_rng(number).permuted(before_LE, axis=1), model.optimizer)
        batches, traces, shards = drawn(routed, case, number)
        with contextlib.ExitStack() as stack:
            if executes:
                made, counts_MLGE, shards = make_plan(routed, model, planned, number, shards, (batches, traces))
                execution = stack.enter_context(routed.execute(made, counts_MLGE, shards))
            else:
                recording = stack.enter_context(routed.record())
            given = carrying(batches, shards) if case.replays else batches
            found["losses"] += step(model.chunks, given, forward)[0]
        found["moved"] += int((routed.home_LE != before_LE).sum())
        if executes:
            found["replicas"] += len(made.hosts.expert_R)
            found["off_plan"] += rows_off_plan(routed, execution, counts_MLGE) if case.complete else 0
        else:
            found["traces"].append(digest(recording.trace()))
        finalize_model_grads(model.chunks)
        model.apply()
    if case.told.get("overlap_param_gather"):
        for chunk in model.chunks:
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                group.finish_param_sync()
    found["weights"] = everything(routed, model)
    for block in moe_layers(chunks).values():
        # it keeps tensors of its last pass, whose graph leads back to it: a circle that nobody collects
        block.token_dispatcher = None
    return found


def built(case):
    install()
    initialize(case.cell)
    chunks = [chunk.bfloat16() if case.rounded else chunk for chunk in build(case.cell)]
    chunks = [chunk.to(chunk.config.params_dtype) for chunk in chunks]
    return chunks, megatron.attach(chunks)


def drawn(routed, case, number):
    """Micro-batches of a step, their routes, and those of this rank; all ranks favour the same experts in a cell."""
    batches, traces, shape = make_batches(case.cell, seed=number), [], (len(case.cell.routed_layers), EXPERTS)
    for m, batch in enumerate(batches):
        favour_LE = np.random.default_rng((number, m)).gumbel(size=shape) * 1.5
        traces.append(made_up(batch, case.cell, number, m, favour_LE=favour_LE, complete=case.complete))
    return batches, traces, sharded(routed, batches, traces, padding=case.padding)


def sharded(routed, batches, traces, **how):
    return [routed.shard(trace, layout_of(batch), **how) for batch, trace in zip(batches, traces, strict=True)]


def make_plan(routed, model, planned, number, shards, data):
    """(plan, counts, shards) of a step. A random plan also moves homes, after which padding is spread elsewhere.

    Slots of "planned" are kept, those of other plans shared.
    """
    ranks = parallel_state.get_expert_model_parallel_world_size()
    topology = Topology(ranks, ranks, 0 if planned == "static" else SLOTS, LINKS)
    counts_MLGE = routed.gather_counts(shards)
    if planned == "random":
        homes = random_plan(counts_MLGE, topology, seed=number, moves=4).home_LE
        routed.move_homes(homes, model.optimizer)
        shards = sharded(routed, *data)
        counts_MLGE = routed.gather_counts(shards)
        return random_plan(counts_MLGE, topology, seed=number, keep=0.0, homes=homes), counts_MLGE, shards
    slots: SlotSharing = "layer" if planned == "planned" else "shared"
    options = PlanOptions(tolerance=0.0, slots=slots, replicas=planned != "static")
    return plan(counts_MLGE, topology, options, home_LE=routed.home_LE), counts_MLGE, shards


def rows_off_plan(routed, execution, counts_MLGE):
    """In how many cells of this rank the experts computed another number of rows than the plan says for updates."""
    here = [routed.spec.layers.index(layer) for layer in routed.layers]
    rank = parallel_state.get_expert_model_parallel_rank()
    served = execution.plan.in_pass("update")
    return sum(
        int(served.cell(m, layer).loads_G(counts_MLGE[m, layer])[rank]) != execution.executed_ML[m, layer]
        for m, layer in itertools.product(range(len(counts_MLGE)), here)
    )


def everything(routed, trained):
    return {
        (i, name): tensor.detach().clone()
        for i, chunk in enumerate(trained.chunks)
        for name, tensor in itertools.chain(chunk.named_parameters(), chunk.named_buffers())
        if "experts." not in name
    } | whole_experts(routed, trained)


def whole_experts(routed, trained):
    """(decoder layer, logical expert, tensor-parallel rank, name, what) -> what all ranks have of it, put together."""
    place, part = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
    mine = []
    for layer, block in moe_layers([chunk.module for chunk in trained.chunks]).items():
        row = [named.index for named in routed.spec.layers].index(layer)
        for slot, expert in enumerate(np.flatnonzero(routed.home_LE[row] == place).tolist()):
            for name, parameter in parameters_of(block.experts, slot).items():
                key = layer, expert, part, name
                mine.append(((*key, "weight"), 0, parameter.numel(), parameter.detach()))
                mine += [((*key, what), *where, t.detach()) for what, *where, t in trained.kept(parameter)]
    return put_together(mine)


def parameters_of(experts, slot):
    if hasattr(experts, "local_experts"):
        return dict(experts.local_experts[slot].named_parameters())
    return {n.removesuffix(str(slot)): p for n, p in experts.named_parameters() if n.endswith(f"weight{slot}")}


def put_together(mine):
    """Key -> the whole tensor, flat, of (key, first element, elements of the whole, tensor) of all ranks."""
    # as bytes: tensors are pickled by way of files, one each
    as_bytes = [(*of, t.dtype, t.reshape(-1).contiguous().view(torch.uint8).numpy()) for *of, t in mine]
    everywhere = gather_objects(as_bytes, dist.group.WORLD, "comparing")
    whole = {}
    for key, first, numel, dtype, held in itertools.chain.from_iterable(everywhere):
        flat = torch.from_numpy(held).view(dtype)
        values = whole.setdefault(key, torch.full((numel,), torch.nan, dtype=flat.dtype))
        before = values[first : first + len(flat)]
        assert bool((before.isnan() | (before == flat)).all()), f"copies of {key} differ"
        values[first : first + len(flat)] = flat
    gaps = [key for key, values in whole.items() if values.isnan().any()]
    assert not gaps, f"nobody has all of {gaps[0]}"
    return whole


def furthest(one, other):
    """The largest difference of losses and weights, over the largest magnitude in the tensor; over all ranks."""
    losses = [abs(a - b) / abs(b) for a, b in zip(one["losses"], other["losses"], strict=True)]
    assert one["weights"].keys() == other["weights"].keys()
    weights = max(_apart(one["weights"][key], other["weights"][key]) for key in one["weights"])
    found = {"losses": max(losses, default=0.0), "weights": weights}
    largest = torch.tensor(list(found.values()), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return dict(zip(found, largest.tolist(), strict=True))


def _apart(a, b):
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300))
