"""Every layout of experts that transformers declares computes what the plain module does, in float64."""

import copy

import numpy as np
import torch

from foreroute.adapters import hf
from foreroute.adapters.hf.distributing import WEIGHT
from tests.adapters.hf.families import build
from tests.ep import by_hand
from tests.ep.transfer.plans import split_plan
from tests.tiers import grid

FAMILIES = {
    "qwen3_moe": "gate and up concatenated",
    "aria": "transposed",
    "gpt_oss": "transposed, biases, interleaved, its own gate",
    "openai_privacy_filter": "transposed, biases, concatenated, its own gate",
    "nemotron_h": "no gate",
    "muse_spark": "a norm after each expert, shared by all of them",
    "minimax_m3_vl": "its own gate",
    "inkling": "shared experts in a module of their own",
}
TOKENS, TOP_K, RANKS = 40, 3, 2


@grid("family", FAMILIES, quick=2)
def test_outputs_and_gradients_are_those_of_the_plain_module(workers, family):
    outcomes = workers(RANKS).run(compare, family)
    for errors in outcomes:
        assert {"output", "hidden", "weights", "down_proj"} <= errors.keys()
        # the norm of muse_spark works in float32
        within = {name: error < (1e-6 if "norm" in name else 1e-12) for name, error in errors.items()}
        assert all(within.values()), errors


def compare(rank, family):
    """Largest relative errors of outputs and gradients of every experts module of the family."""
    # eager experts of openai_privacy_filter work in float32, grouped_mm has no float64
    model = build(family, experts="batched_mm", dtype=torch.float64)
    plain = copy.deepcopy(model)
    placed = hf.distribute(model, timeout_s=20)
    inputs = [made_up(plain.get_submodule(layer.path), layer.number) for layer in placed.layers]
    num_experts = placed.home_LE.shape[1]
    counts_LGE = np.stack([[count(part, num_experts) for part in ids.chunk(RANKS)] for _, ids, _ in inputs])
    errors, whole_step = {}, torch.ones(TOKENS // RANKS, dtype=torch.bool)
    plan = split_plan(3, counts_LGE[None], placed.home_LE)
    with by_hand.executing(placed, plan, counts_LGE[None], rank, routed_R=whole_step):
        for layer, whole in zip(placed.layers, inputs, strict=True):
            mine = [tensor.detach().chunk(RANKS)[rank].requires_grad_(tensor.requires_grad) for tensor in whole]
            out = layer.module(*mine)
            (out * out).sum().backward()
            true = plain.get_submodule(layer.path)(*whole)
            (true * true).sum().backward()
            found = {"output": (out, true.chunk(RANKS)[rank])}
            for name, part, all_of_it in zip(("hidden", "", "weights"), mine, whole, strict=True):
                if name:
                    found[name] = (part.grad, all_of_it.grad.chunk(RANKS)[rank])
            placed.sum_gradients()
            for name, parameter in plain.get_submodule(layer.path).named_parameters():
                grad = layer.module.get_parameter(name).grad
                found[name] = (layer.gather(grad) if WEIGHT.fullmatch(name) else grad, parameter.grad)
            for name, (here, there) in found.items():
                errors[name] = max(errors.get(name, 0.0), float((here - there).norm() / there.norm()))
            for parameter in placed.dense_parameters():
                parameter.grad = None
    return errors


def made_up(module, seed):
    """Rows, distinct experts and gate weights of all ranks; more for the first experts."""
    generator = torch.Generator().manual_seed(seed)
    width = module.down_proj.shape[2 if module.is_transposed else 1]
    hidden = torch.randn(TOKENS, width, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS, module.num_experts, generator=generator) - torch.linspace(0, 1, module.num_experts)
    weights = torch.rand(TOKENS, TOP_K, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), scores.topk(TOP_K).indices, weights.requires_grad_()


def count(ids, num_experts):
    return np.bincount(ids.flatten().numpy(), minlength=num_experts)
