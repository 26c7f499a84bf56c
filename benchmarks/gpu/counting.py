"""Places in the code where the host waits for a GPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

SYNCHRONIZING = "synchronizing CUDA operation"
DATA_PATH = tuple(f"foreroute/ep/{name}" for name in ("layer.py", "compute.py", "transfer/"))
"""What runs between the rows of a step. The beginnings of steps and micro-steps, where ranks agree, are elsewhere."""


def waits_on_cuda(work: Callable[[], object]) -> list[str]:
    """List where the host waits for the device in one call, a place for each time PyTorch's sync debug mode warns.

    It sees what operators wait for, blocking copies in both directions among them, and no explicit waits for a stream
    or an event.
    """
    work()  # what waits once in a process does so here
    before = torch.cuda.get_sync_debug_mode()
    # Python shows a warning once for a place, unless told otherwise
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return [place(each.filename, each.lineno) for each in caught if SYNCHRONIZING in str(each.message)]


def waits_are_seen(device: torch.device) -> bool:
    """Say whether that mode sees a wait which is there; otherwise it would see none elsewhere."""
    return device.type == "cuda" and bool(waits_on_cuda(lambda: torch.ones(1, device=device).item()))


def launch_waits(work: Callable[[], object]) -> list[str]:
    """List waits of `waits_on_cuda`, and explicit ones for a stream or an event, on the data path of a layer."""
    explicit: list[str] = []
    with ExitStack() as stack:
        for kind in (torch.cuda.Stream, torch.cuda.Event):

            def noting(waited: Any, wait: Callable[[Any], None] = kind.synchronize) -> None:
                caller = sys._getframe(1)
                explicit.append(place(caller.f_code.co_filename, caller.f_lineno))
                wait(waited)

            stack.enter_context(patch.object(kind, "synchronize", noting))
        found = waits_on_cuda(work)
    return [each for each in dict.fromkeys(found + explicit) if each.startswith(DATA_PATH)]


def place(file: str, line: int) -> str:
    """A line of code, by the path inside its package."""
    for root in ("site-packages/", "src/"):
        file = file.rpartition(root)[2] if root in file else file
    return f"{file}:{line}"
