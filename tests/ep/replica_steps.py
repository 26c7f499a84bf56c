"""A step of two padded micro-batches on uneven routes: the plain model on one process, and ranks that spread it."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import foreroute as fr
from foreroute.adapters import hf
from foreroute.ep.transfer.engine import TransferOptions
from tests.adapters.hf.model_runs import batch_of, enable_checkpointing, gradients, log_probs, sequences_of
from tests.ep.executor_properties import fetched_bytes
from tests.ep.spread_models import load_spread, sharded
from tests.ep.transfer.plans import loads_MLG, split_plan

MICRO_STEPS = 2
HEAD = {"lm_head": "colwise_gather_output"}
SPREAD = {
    "one group": (2, {"fsdp_size": 2, "ep_size": 2}),
    "mixed precision": (2, {"fsdp_size": 2, "ep_size": 2, "fsdp_mixed_precision": True}),
    "a shared batch": (2, {"tp_size": 2, "ep_size": 2, "tp_plan": HEAD}),
    "two groups": (4, {"fsdp_size": 4, "ep_size": 2}),
    "shared batches": (4, {"fsdp_size": 2, "tp_size": 2, "ep_size": 4, "tp_plan": HEAD}),
    "two groups of a batch each": (4, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2, "tp_plan": HEAD}),
    "copies": (4, {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}),
}
"""How many ranks, and sizes of `DistributedConfig`."""


@dataclass(frozen=True)
class Way:
    """How a step is executed."""

    plan: int | None = 3  # the seed of random replicas and splits
    slots: str = "layer"
    paths: str = "direct"
    use_reentrant: bool | None = None  # of activation checkpointing; None without


def batch(number, micro_step):
    """Padded on either side; ranks have different numbers of tokens."""
    lengths = np.random.default_rng([number, micro_step]).integers(3, 12, size=2)
    return batch_of(*lengths, seed=10 * micro_step + number, side=("left", "right")[micro_step % 2])


def routes(spec, number, micro_step):
    """Random, and uneven as trained routers are; without a route for last tokens."""
    rng, tokens = np.random.default_rng([7, number, micro_step]), sequences_of(batch(number, micro_step))
    favour, shape = np.linspace(1.2, 0, spec.num_experts), (spec.num_layers, spec.num_experts)
    ids = [np.argsort(rng.random((len(t) - 1, *shape)) - favour, axis=-1)[..., : spec.top_k] for t in tokens]
    return fr.RoutingTrace.from_sequences(spec, tokens, ids)


def drawn(spec, number):
    return [(batch(number, m), routes(spec, number, m)) for m in range(MICRO_STEPS)]


def step_of(model, routed, given):
    """Log-probs of a rank, and gradients of the sum of its mean losses, whole. Backward passes follow all forwards."""
    found, losses = [], []
    sharded(model).zero_grad()
    for each, trace in given:
        with routed.replay(trace):
            found.append(log_probs(model, each))
        losses.append(-found[-1].mean())
    for loss in losses:
        loss.backward()
    return torch.cat(found).detach(), gradients(model)


def alone(folder, num_batches):
    """The mean over ranks, by the plain model on one process in float64; log-probs by rank."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", trust_remote_code=False, use_safetensors=True
    ).eval()
    routed = hf.attach(model)
    found = [step_of(model, routed, drawn(routed.spec, number)) for number in range(num_batches)]
    grads = {name: sum(each[name] for _, each in found) / num_batches for name in found[0][1]}
    return [each for each, _ in found], grads


@dataclass
class Ran:
    """A step on one rank."""

    log_probs: torch.Tensor  # of this rank
    grads: dict[str, torch.Tensor]  # of all
    rows: tuple = ()  # of this rank, by micro-step and layer: planned, and executed
    fetched: dict[str, int] = field(default_factory=dict)  # bytes that came for replicas, by path


def steps(rank, folder, spread, dtype, ways):
    """What "all_to_all" makes of a step under replay, and what each way of executing it makes."""
    num_ranks, config = SPREAD[spread]
    num_shared = config.get("tp_size", 1)
    theirs, ours = (load_spread(folder, name, dtype, **config) for name in ("all_to_all", "foreroute"))
    attached, routed = hf.attach(theirs), hf.attach(ours)
    given = drawn(routed.spec, rank // num_shared)
    traces = [trace for _, trace in given]
    found = {"all_to_all": Ran(*step_of(theirs, attached, given))}
    scale = num_ranks // num_shared if dtype == torch.float64 and is_divided_twice(config) else 1
    counts_MLGE = routed.gather_counts(traces)
    for way in ways:
        ours.gradient_checkpointing_disable()
        enable_checkpointing(ours, way.use_reentrant)
        routed.use(TransferOptions(paths=way.paths))
        made = partial(split_plan, way.plan, counts_MLGE, routed.home_LE, sharing=way.slots)
        plan = None if way.plan is None else made()
        with routed.execute(plan, counts_MLGE, traces) as execution:
            result = step_of(ours, routed, given)
        me = routed.spread.layers[0].ep_mesh.get_local_rank()
        rows = loads_MLG(execution.plan, counts_MLGE)[..., me].tolist(), execution.executed_ML.tolist()
        found[way] = Ran(*result, rows, fetched_bytes(execution))
    for ran in found.values():
        ran.grads = {name: scale * each if ".experts." in name else each for name, each in ran.grads.items()}
    routed.close()
    return found


def is_divided_twice(config):
    """Whether FSDP2 divides gradients of experts twice by the number of batches, as it does in float64 and float16.

    So it does where a group has one rank: findings/fsdp2_divides_twice.sh.
    """
    return "fsdp_size" in config and config["ep_size"] == config["fsdp_size"] * config.get("tp_size", 1)
