"""Running a model and seeing what its experts were really given."""

from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import foreroute as fr
from foreroute.adapters import hf
from foreroute.testing.models import tiny
from tests.replay.session_subject import random_ids


def batch_of(*lengths, seed=0, side="right"):
    """Padded tokens, with the mask, of sequences of the given lengths."""
    rng = np.random.default_rng(seed)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    mask = mask if side == "right" else mask.flip(1)
    input_ids = torch.zeros_like(mask)
    input_ids[mask.bool()] = torch.from_numpy(np.concatenate([rng.integers(1, 50, length) for length in lengths]))
    return {"input_ids": input_ids, "attention_mask": mask}


def packed(sequences, rows):
    """The sequences of `rows[b]` one after the other in row b, as many tokens in each, positions counted in each."""
    lines = [np.concatenate([[sequences[s], np.arange(len(sequences[s]))] for s in row], axis=1) for row in rows]
    input_ids, position_ids = torch.from_numpy(np.stack(lines, axis=1))
    return {"input_ids": input_ids, "position_ids": position_ids}


def sequences_of(batch):
    return [ids[mask.bool()].numpy() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def with_routes(batch, family="qwen3_moe", **options):
    """A tiny model, attached, and routes of a batch that it would not take."""
    model = tiny(family, **options)
    routed = hf.attach(model)
    return model, routed, random_routes(routed.spec, batch)


def uneven(sizes=((8, 2), (6, 3), (5, 1)), *, seed=0, **options):
    """A tiny Qwen3 whose layers have these experts and picks."""
    options["num_hidden_layers"] = len(sizes)
    models = [
        tiny("qwen3_moe", seed=seed + number, num_experts=num_experts, num_experts_per_tok=top_k, **options)
        for number, (num_experts, top_k) in enumerate(sizes)
    ]
    for layer, other in enumerate(models):
        models[0].model.layers[layer].mlp = other.model.layers[layer].mlp
    return models[0]


EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
"""What `with_lora` takes for adapters on every expert."""


def with_lora(model, **options):
    """With adapters, by default on the attention, which change something from the first."""
    import peft  # which takes seconds

    options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(**options))


def random_routes(spec, batch, seed=1):
    """Routes of no relation to the model."""
    rng, tokens = np.random.default_rng(seed), sequences_of(batch)
    return fr.RoutingTrace.from_sequences(spec, tokens, [random_ids(rng, spec, len(each)) for each in tokens])


def log_probs(model, batch):
    """[tokens], of every next token that is not padding."""
    return log_probs_of(whole(model(**batch, use_cache=False).logits), batch)


def log_probs_of(logits, batch):
    picked = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    real = (batch["attention_mask"][:, 1:] * batch["attention_mask"][:, :-1]).bool()
    return picked[real]


def loss_of(model, batch):
    return -log_probs(model, batch).mean()


def gradients(model):
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def whole(tensor):
    """What the ranks hold of a tensor, together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def enable_checkpointing(model, use_reentrant):
    if use_reentrant is not None:
        checkpointed_by_library(model.train(), {"use_reentrant": use_reentrant})


def checkpointed_by_library(model, *arguments):
    """By the name that transformers has for it: the older one warns where there is a newer one."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(*arguments)


def checkpoint_by_hand(model, use_reentrant):
    """Every layer in a checkpoint that no library knows of."""
    for layer in model.train().model.layers:
        run = layer.forward
        layer.forward = lambda h, run=run, **kw: checkpoint(lambda x: run(x, **kw), h, use_reentrant=use_reentrant)


@contextmanager
def experts_log(model):
    """Every (path, ids) that an experts module is called with, recomputations included."""
    log = []
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if type(module).__name__.endswith("Experts"):
                note = partial(lambda path, _, args: log.append((path, args[1].detach().clone())), path)
                stack.enter_context(module.register_forward_pre_hook(note))
        yield log


# What routers hand on is no oracle of gate weights: older releases hand on probabilities in the place of logits.
def qwen3_gate(router, ids_RK, hidden):
    logits_RE = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    weights_RK = logits_RE.float().softmax(-1).gather(-1, ids_RK)
    return weights_RK / weights_RK.sum(-1, keepdim=True)


def gpt_oss_gate(router, ids_RK, hidden):
    logits_RE = linear(hidden.reshape(-1, hidden.shape[-1]), router.weight, router.bias)
    return logits_RE.gather(-1, ids_RK).softmax(-1)


HAND_GATES = {"Qwen3MoeTopKRouter": qwen3_gate, "GptOssTopKRouter": gpt_oss_gate}


def force_by_hand(model, ids_NLK, real_R=slice(None)):
    """Have routers take these experts, with nothing of ours: gates from live scores. Returns handles of the hooks."""
    handles = []
    routers = [module for module in model.modules() if type(module).__name__ in HAND_GATES]
    for router, ids_NK in zip(routers, torch.from_numpy(ids_NLK.astype(np.int64)).unbind(1), strict=True):

        def pick(module, args, result, ids_NK=ids_NK):
            handed_on, own_weights_RK, own_RK = result
            ids_RK = own_RK.clone()
            ids_RK[real_R] = ids_NK
            weights_RK = HAND_GATES[type(module).__name__](module, ids_RK, *args)
            return handed_on, weights_RK.to(own_weights_RK.dtype), ids_RK

        handles.append(router.register_forward_hook(pick))
    return handles


@contextmanager
def forced_by_hand(model, trace, batch):
    """`force_by_hand` on the routes of a trace. Padding takes what the router picks."""
    with ExitStack() as stack:
        for handle in force_by_hand(model, trace.expert_ids_NLK, batch["attention_mask"].bool().reshape(-1)):
            stack.enter_context(handle)
        yield
