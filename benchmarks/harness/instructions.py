"""User instructions of this process as the kernel counts them (perf_event_open), which no neighbour moves.

Counted are the thread that opens the counter, and all threads and processes that come from it afterwards. A virtual
machine often has no such counter, and a container may be refused it; then the reason stands in its place.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable
from typing import NamedTuple

Counter = Callable[[], int]
"""How much was counted since it was opened."""

INSTRUCTIONS, PAGE_FAULTS = (0, 1), (1, 2)
"""Type and config of an event (linux/perf_event.h)."""
SYSCALL = {"x86_64": 298, "aarch64": 241}
"""The number of perf_event_open."""
PINNED, INHERIT, NO_KERNEL, NO_HYPERVISOR = 1 << 2, 1 << 1, 1 << 5, 1 << 6
WHY = {
    errno.ENOENT: "this machine has no counter of instructions, as most virtual ones",
    errno.EOPNOTSUPP: "this machine has no counter of instructions, as most virtual ones",
    errno.EACCES: "the kernel refuses (kernel.perf_event_paranoid must be 2 or less)",
    errno.EPERM: "the kernel or a container refuses (kernel.perf_event_paranoid must be 2 or less)",
    errno.ENOSYS: "the kernel was built without perf_event_open",
}


class Counting(NamedTuple):
    """A counter, or the reason why there is none.

    Attributes:
        counter: of the event; None where nothing counts it.
        reason: why it is None, else empty.
    """

    counter: Counter | None
    reason: str

    def reported(self) -> dict[str, str]:
        """`instructions_reason` for the metrics, where instructions are missing."""
        return {"instructions_reason": self.reason} if self.reason else {}


def count_in_user_space(event: tuple[int, int] = INSTRUCTIONS) -> Counting:
    """Begin to count an event in user space."""
    number = SYSCALL.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return Counting(None, f"counted on Linux on {' and '.join(SYSCALL)} alone, not on {platform.platform()}")
    kind, config = event
    flags = PINNED | INHERIT | NO_KERNEL | NO_HYPERVISOR
    # perf_event_attr in its first published size
    attributes = struct.pack("=IIQQQQQIIQ", kind, 64, config, 0, 0, 0, flags, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    this_thread, any_core, no_group, close_on_exec = 0, -1, -1, 8
    file = libc.syscall(number, attributes, this_thread, any_core, no_group, close_on_exec)
    if file < 0:
        error = ctypes.get_errno()
        return Counting(None, f"{WHY.get(error, 'perf_event_open failed')}: {os.strerror(error)}")

    def counter() -> int:
        # a pinned event hands out nothing once its counter was taken away
        if len(counted := os.read(file, 8)) != 8:
            raise RuntimeError("the kernel gave the counter of instructions to somebody else; run the benchmark alone")
        return int.from_bytes(counted, "little")

    if event == INSTRUCTIONS and not int.from_bytes(os.read(file, 8), "little"):
        return Counting(None, "the counter of instructions counts nothing: the machine has none, or lent it out")
    return Counting(counter, "")
