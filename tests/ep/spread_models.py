"""Tiny models that transformers spreads over the ranks of a test, and what they compute."""

from contextlib import ExitStack

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.adapters.hf.model_runs import gradients, whole


def load_spread(folder, implementation="foreroute", dtype=torch.float32, *, model_class=AutoModelForCausalLM, **sizes):
    """A folder's model, spread by these sizes of `DistributedConfig`; two ranks with a batch each by default."""
    sizes = sizes or {"fsdp_size": 2, "ep_size": 2}
    config = DistributedConfig(**sizes, ep_implementation=implementation)
    # grouped_mm knows no float64
    how = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    return model_class.from_pretrained(folder, dtype=dtype, distributed_config=config, **how).eval()


def sharded(model):
    """Without weights that a forward without a backward has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def run(model, batch, *contexts, weigh=None):
    """What the model gives first, and gradients by name, whole: of the mean loss, or of a number that is made of it."""
    sharded(model).zero_grad()
    labels = {} if weigh else {"labels": batch["input_ids"]}
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        out = model(**batch, **labels, use_cache=False)
        found = whole(out[0] if weigh else out.logits)
        (weigh(found) if weigh else out.loss).backward()
    grads = gradients(model)
    model.zero_grad()
    return found.detach().clone(), grads
