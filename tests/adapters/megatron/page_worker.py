"""What runs the blocks of docs/megatron.md, and the example, on a rank."""

import contextlib
import io
import runpy
import sys
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from foreroute.adapters import megatron
from tests.adapters.megatron import one_rank as on
from tests.adapters.megatron.forked_ranks import ROOT
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import VOCABULARY, build, initialize

PAGE_WIDTH = 16


def run_example(*arguments):
    """What a process of torchrun prints, in the group that is there."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", ["grpo.py", *arguments]),
    ):
        runpy.run_path(str(ROOT / "examples" / "megatron" / "grpo.py"), run_name="__main__")
    return printed.getvalue()


def run_blocks(page, blocks):
    """As a reader would, one after the other. Blocks are (number of the line before it, code)."""
    namespace = a_users_things()
    for line, code in blocks:
        exec(compile("\n" * line + code, page, "exec"), namespace)


def a_users_things():
    """A model that is trained, its forward step, micro-batches, and what an engine recorded of them."""
    initialize(Cell())
    [model] = build(Cell(as_shipped=True, recompute="uniform"))
    generator = torch.Generator().manual_seed(0)
    batches = [{"tokens": torch.randint(1, VOCABULARY, (2, PAGE_WIDTH), generator=generator)} for _ in range(2)]
    spec = megatron.attach(model).spec
    traces = [
        on.foreign(spec, batch["tokens"], seed, lengths=(PAGE_WIDTH, PAGE_WIDTH), complete=False)
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
            "seq_length": PAGE_WIDTH,
            "micro_batch_size": 2,
            "forward_only": False,
        },
    }


def forward_step(batches, model):
    tokens = next(batches)["tokens"]
    positions = torch.arange(PAGE_WIDTH).expand_as(tokens)
    ahead = torch.ones(PAGE_WIDTH, PAGE_WIDTH, dtype=torch.bool).triu(1)[None, None]
    losses = model(tokens, positions, ahead, labels=tokens.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().item()})
