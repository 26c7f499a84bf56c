"""Places in the code where the host waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

SYNCHRONIZING = "synchronizing CUDA operation"


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


def place(file: str, line: int) -> str:
    """A line of code, by the path inside its package."""
    for root in ("site-packages/", "src/"):
        file = file.rpartition(root)[2] if root in file else file
    return f"{file}:{line}"
