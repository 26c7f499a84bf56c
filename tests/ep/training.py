"""Three optimizer steps on tiny models, on one process and on many."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import peft
import torch

import foreroute as fr
from foreroute.adapters import hf
from foreroute.testing.models import tiny
from tests.adapters.hf.families import SPARSE, build
from tests.adapters.hf.model_runs import batch_of, checkpoint_by_hand, enable_checkpointing, log_probs, sequences_of
from tests.traces import foreign_choices

STEPS, MICRO_STEPS = 3, 2
RANK = 3
"""Of adapters."""


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        family: of the model; those of `SPARSE` replay choices of indexers beside routes.
        ranks: G.
        routing: "live", "replay" of random routes, or "crowded": of routes to the first experts alone, so that other
            ranks have nothing to do.
        plan: None; "static" for homes alone; "planned" by the planner; "shuffled" for random homes
            alone; a seed for random homes, replicas and splits.
        use_reentrant: of activation checkpointing; "by hand" for torch's around each layer; None without.
        missing: which tokens of each sequence have no route: None, its "last", or its "second" too. The model routes
            them; of others than last ones, ranks exchange counts.
        dtype: of the model.
        weights: where replicas come from: "direct", or an engine with slots by "layer" or "shared"; "lost"
            and "doubled" with gradients tampered with.
        lora: whether only PEFT's adapters are trained, those of every expert's matrices and of the attention.
    """

    family: str = "qwen3_moe"
    ranks: int = 4
    routing: str = "replay"
    plan: str | int | None = None
    use_reentrant: bool | str | None = None
    missing: str | None = None
    dtype: torch.dtype = torch.float32
    weights: str = "direct"
    lora: bool = False

    @property
    def id(self):
        ways = {None: "plain", True: "reentrant", False: "non_reentrant", "by hand": "by_hand"}
        parts = [self.family, f"{self.ranks}_ranks", self.routing, f"plan_{self.plan}", ways[self.use_reentrant]]
        parts += [f"{self.missing}_tokens_missing"] * bool(self.missing) + [self.weights]
        parts += ["lora"] * self.lora
        return "-".join([*parts, str(self.dtype).removeprefix("torch.")])

    @property
    def alone(self):
        """The same training of the plain model."""
        return replace(self, plan=None, use_reentrant=None, weights="direct")


def policy(case):
    # grouped_mm knows no float64
    experts = "eager" if case.dtype == torch.float64 else "grouped_mm"
    if case.family in SPARSE:
        model = build(case.family, experts=experts, **SPARSE[case.family] | {"index_topk": 3}).to(case.dtype)
    else:
        model = tiny(case.family, experts=experts).to(case.dtype)
    if case.use_reentrant == "by hand":
        checkpoint_by_hand(model, use_reentrant=False)
    else:
        enable_checkpointing(model.train(), case.use_reentrant)
    return with_lora(model, case.use_reentrant) if case.lora else model


def with_lora(model, use_reentrant=None):
    """With adapters that change something from the first."""
    if use_reentrant:
        model.enable_input_require_grads()
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=RANK, target_modules=["o_proj"], target_parameters=experts, init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return peft.get_peft_model(model, config)


def batch(rank, step, micro_step):
    """Padded on either side; ranks have different numbers of tokens."""
    lengths = np.random.default_rng([rank, step, micro_step]).integers(3, 12, size=2)
    return batch_of(*lengths, seed=100 * step + 10 * micro_step + rank, side=("left", "right")[micro_step % 2])


def num_targets(num_ranks, step):
    """Of all ranks and micro-steps."""
    masks = [batch(r, step, m)["attention_mask"] for r in range(num_ranks) for m in range(MICRO_STEPS)]
    return sum(int((mask.sum(dim=1) - 1).sum()) for mask in masks)


def routes(spec, case, rank, step, micro_step):
    """Random, and uneven as trained routers are."""
    rng = np.random.default_rng([7, rank, step, micro_step])
    favour = np.linspace(1.2, 0, spec.num_experts)
    favour[: spec.top_k] += 2.0 * (case.routing == "crowded")
    tokens = sequences_of(batch(rank, step, micro_step))
    left_out = 1 if case.missing else 0
    shape = (spec.num_layers, spec.num_experts)
    ids = [np.argsort(rng.random((len(t) - left_out, *shape)) - favour, axis=-1)[..., : spec.top_k] for t in tokens]
    trace = fr.RoutingTrace.from_sequences(spec, tokens, ids)
    if case.missing != "second":
        return trace
    valid_N = trace.valid_N.copy()
    valid_N[trace.offsets[:-1] + 1] = False
    return replace(trace, valid_N=valid_N)


def by_expert(name, tensor):
    """[8, ...], a parameter of all experts or its gradient, or the factors of adapters in PEFT's order."""
    if "lora_A" in name:
        return tensor.unflatten(0, (8, RANK))
    return tensor.unflatten(1, (RANK, 8)).movedim(2, 0) if "lora_B" in name else tensor


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@lru_cache
def train_alone(case, draw=0):
    """Losses of every rank and micro-step, gradients of the first step, and the last weights, of the plain model.

    Draws from 1 on begin with every weight off by a unit in the last place, up or down: their roundings are others.
    """
    model = policy(case)
    generator = torch.Generator().manual_seed(draw)
    for parameter in model.parameters() if draw else ():
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.data *= 1 + signs * torch.finfo(case.dtype).eps
    routed = hf.attach(model)
    optimizer = optimizer_of(model)
    losses, first = [], None
    for step in range(STEPS):
        for m in range(MICRO_STEPS):
            for rank in range(case.ranks):
                with replaying(routed, case, rank, step, m):
                    loss = -log_probs(model, batch(rank, step, m)).sum() / num_targets(case.ranks, step)
                    loss.backward()
                losses.append(loss.item())
        first = first or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.tensor(losses, dtype=torch.float64), "grads": first, "state": state(model)}


def gradients(model):
    """Indexers get none."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def replaying(routed, case, rank, step, micro_step, rows=None):
    """A session on the routes of a micro-step, or on what `rows` made of them."""
    if case.routing == "live":
        return nullcontext()
    routes = decisions(routed, case, rank, step, micro_step) if rows is None else rows
    return routed.replay(routes, missing="native" if case.missing else "error")


def decisions(routed, case, rank, step, micro_step):
    """The routes, and choices of indexers where the model has some, of no relation to it."""
    trace = routes(routed.spec, case, rank, step, micro_step)
    return trace if routed.indexers is None else foreign_choices(trace, routed.indexers, seed=step)
