"""The process that a reader is attacked in. A crash, a hang or the memory limit ends this process, not the benchmark.

Before each case its number goes to a shared page, so that the parent knows which input a dead or silent child was at.
Results of `BATCH` cases at a time go to standard output, one JSON object a line.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzzing.target import Target, Verdict, judge, load_group

BATCH = 50
"""Cases that share one valid input."""
ADDRESS_SPACE = 512 << 20
"""What a child may map beyond what it has mapped when its first target has read a valid input."""
MORE_MEMORY = 64 << 20
"""What a malformed input may take beyond the valid one it was made from."""
SLACK = 4 << 20
"""The kernel counts resident pages in batches per thread, and the allocator grows in steps."""
AT = struct.Struct("<qq")
"""Which job a child is at, and which case; -1 while it makes a valid input, for which kernels may be compiled."""


class Peak:
    """Peak resident memory of this process since it was last reset, from the kernel."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._reset = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def reset(self) -> int:
        """Start anew; returns the bytes that are resident."""
        os.pwrite(self._reset, b"5", 0)
        return self.read()

    def read(self) -> int:
        """Bytes."""
        text = os.pread(self._status, 4096, 0)
        start = text.index(b"VmHWM:") + 6
        return int(text[start : text.index(b"kB", start)]) * 1024


def main() -> None:
    """`python -m benchmarks.fuzzing.child GROUP JOBS SEED PAGE`. JOBS is JSON, [[target, first case, cases], ...]."""
    group, jobs, seed, shared = sys.argv[1:]
    with open(shared, "r+b") as opened, tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        page = mmap.mmap(opened.fileno(), AT.size)
        targets = {target.name: target for target in load_group(group, Path(folder))}
        peak = Peak()
        for number, (name, first, count) in enumerate(json.loads(jobs)):
            for start in range(first - first % BATCH, first + count, BATCH):
                cases = range(max(start, first), min(start + BATCH, first + count))
                begin = partial(AT.pack_into, page, 0, number)
                begin(-1)
                result = attack(targets[name], peak, int(seed), start, cases, begin)
                print(json.dumps({"target": name, "after": cases.stop, **result}), flush=True)


def attack(
    target: Target, peak: Peak, seed: int, start: int, cases: range, begin: Callable[[int], object]
) -> dict[str, Any]:
    """Some of the cases of the batch that begins at `start`. `begin` is called with the number of each."""
    rng = np.random.default_rng([seed, start])
    valid = target.make(rng)
    expected = target.read(valid)
    _limit_address_space()
    before = peak.reset()
    target.read(valid)
    usual = peak.read() - before + SLACK
    verdicts: Counter[str] = Counter()
    failures, extra = [], 0
    for case in cases:
        begin(case)
        raw, forged = target.malformed(valid, case, np.random.default_rng([seed, case, 1]))
        before = peak.reset()
        verdict, seen = judge(target, raw, expected, forged=forged)
        more = peak.read() - before - usual
        extra = max(extra, more)
        if more > MORE_MEMORY:
            verdict, seen = Verdict.MEMORY, f"took {more >> 20} MiB more than the valid input"
        verdicts[verdict] += 1
        if seen:
            failures.append({"case": case, "verdict": verdict, "seen": seen})
    return {"verdicts": verdicts, "failures": failures, "extra": extra}


@cache
def _limit_address_space() -> None:
    """An allocation far beyond what any valid input needs fails, whether its pages are touched or not."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, mapped + ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
