"""Whether the code that calls is a function that some checkpoint will run again in backward."""

from __future__ import annotations

import sys
from types import CodeType

import torch


def saves_for_checkpoint() -> bool:
    """Whether a non-reentrant `torch.utils.checkpoint` is running its function now."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", "")


def runs_without_gradients_in(*forwards: CodeType) -> bool:
    """Whether one of these forwards of reentrant checkpoints is running its function now.

    That looks like any evaluation without gradients; what tells it apart is who called.
    """
    frame = None if torch.is_grad_enabled() else sys._getframe()
    while frame is not None:
        if frame.f_code in forwards:
            return True
        frame = frame.f_back
    return False
