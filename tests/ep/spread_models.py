"""Tiny models that transformers spreads over the ranks of a test, and what they compute."""

from contextlib import ExitStack

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig


def load_spread(folder, implementation="foreroute", dtype=torch.float32, *, model_class=AutoModelForCausalLM, **sizes):
    """A folder's model, spread by these sizes of `DistributedConfig`; two ranks with a batch each by default."""
    sizes = sizes or {"fsdp_size": 2, "ep_size": 2}
    config = DistributedConfig(**sizes, ep_implementation=implementation)
    # grouped_mm knows no float64
    how = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return model_class.from_pretrained(folder, dtype=dtype, distributed_config=config, **how).eval()


def whole(tensor):
    """What the ranks hold of a tensor, together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded(model):
    """Without weights that a forward without a backward has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def run(model, batch, *contexts):
    """Logits, and gradients of the mean loss by name, whole; and what the contexts give."""
    sharded(model).zero_grad()
    with ExitStack() as stack:
        entered = [stack.enter_context(each) for each in contexts]
        out = model(**batch, labels=batch["input_ids"], use_cache=False)
        out.loss.backward()
    grads = {name: whole(each.grad).clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return whole(out.logits).detach().clone(), grads, entered
