"""How much memory a piece of work holds at most."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

MMAP_THRESHOLD, SMALLEST_MAPPED = -3, 1 << 16
"""Parameters of `mallopt`: larger pieces are mapped by themselves, and given back when they are freed."""


def peak_of(work: Callable[[], Result]) -> tuple[Result, int]:
    """What `work` returns, and by how many bytes the memory of this process grew at most while it ran.

    Freed memory that malloc would keep is given back at once from here on, and garbage is collected before, so that
    what is counted is what the work holds. Pages of mapped files are left out, which the system can drop at any time.
    It asks glibc, and the kernel of Linux.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, SMALLEST_MAPPED)
    gc.collect()
    libc.malloc_trim(0)
    before, most, over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            most[0] = max(most[0], anonymous_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        return work(), max(most[0], anonymous_bytes()) - before
    finally:
        over.set()
        watching.join()


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
