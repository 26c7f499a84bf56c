"""One command that proves foreroute on a GPU: `make gpu`, in at most nine minutes, in parts that save as they go.

Every part runs in a process of its own, so that one that crashes or hangs costs the others nothing. With `--device cpu`
all that can run does so at small sizes: this shows that the command works, and its figures say nothing.
"""

from __future__ import annotations

from benchmarks.gpu.runner import PARTS, run

__all__ = ["PARTS", "run"]
