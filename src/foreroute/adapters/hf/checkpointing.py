"""What is known about activation checkpointing: whose is ours to prepare, and whose is not."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from foreroute.adapters.recomputation import runs_without_gradients_in, saves_for_checkpoint
from foreroute.errors import ReplayError

CHECKPOINTS_IN = ("_gradient_checkpointing_func", "checkpoint_fn")
"""The attributes in which a layer of transformers, and torch's CheckpointWrapper, keep what checkpoints them."""


def require_prepared(path: str, *, began_with_grad: bool) -> None:
    """Raise `ReplayError` if a recomputation will follow that nobody has prepared.

    Args:
        path: what runs now.
        began_with_grad: whether gradients were recorded when its pass began.
    """
    # use_reentrant=True runs its first forward without gradients
    if (began_with_grad and not torch.is_grad_enabled()) or saves_for_checkpoint():
        raise _by_hand(path)


def require_unchecked(path: str) -> None:
    """Raise `ReplayError` if a whole pass that begins now is the first forward of a reentrant checkpoint."""
    if runs_without_gradients_in(CheckpointFunction.forward.__code__):
        raise _by_hand(path)


def compilable_under_checkpointing() -> AbstractContextManager[Any]:
    """Let Dynamo trace a checkpointed region with a function mode in it, as long as the context is open.

    It refuses by default, because a recomputation would not enter the mode again. It need not: the graph keeps routes.
    """
    dynamo = sys.modules.get("torch._dynamo")  # where nothing was compiled yet, importing it would cost seconds
    return nullcontext() if dynamo is None else dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)


def _by_hand(path: str) -> ReplayError:
    return ReplayError(
        f"{path} runs inside torch.utils.checkpoint called by hand, whose recomputation cannot be told which forward "
        "it belongs to. Use the model's own activation checkpointing (model.gradient_checkpointing_enable()) or "
        "torch's CheckpointWrapper, switched on before the session is opened"
    )
