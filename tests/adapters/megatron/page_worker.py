"""Runs the Python blocks of a page as its reader would, one after the other, in a process with Megatron."""

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from foreroute.adapters import megatron
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import VOCABULARY, build, initialize

WIDTH = 16


def run_blocks(page, blocks):
    """Blocks are (number of the line before it, code)."""
    namespace = a_users_things()
    for line, code in blocks:
        exec(compile("\n" * line + code, page, "exec"), namespace)


def a_users_things():
    """A model that is trained, its forward step, micro-batches, and what an engine recorded of them."""
    initialize(Cell())
    [model] = build(Cell(as_shipped=True, recompute="uniform"))
    generator = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(1, VOCABULARY, (2, WIDTH), generator=generator)} for _ in range(2)]
    spec = megatron.attach(model).spec
    traces = [
        on.foreign(spec, batch["tokens"], seed, lengths=(WIDTH, WIDTH), complete=False)
        for seed, batch in enumerate(batches)
    ]
    return {
        "torch": torch,
        "get_forward_backward_func": get_forward_backward_func,
        "model": model.train(),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "forward_step": forward_step,
        "batches": batches,
        "traces": traces,
        "schedule": {
            "num_microbatches": len(batches),
            "seq_length": WIDTH,
            "micro_batch_size": 2,
            "forward_only": False,
        },
    }


def forward_step(batches, model):
    tokens = next(batches)["tokens"]
    positions = torch.arange(WIDTH).expand_as(tokens)
    ahead = torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu(1)[None, None]
    losses = model(tokens, positions, ahead, labels=tokens.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().item()})
