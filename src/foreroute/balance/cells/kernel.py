"""How the loops of this folder are compiled."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import config, njit

# Of compiled code on disk, numba checks only the file that the function stands in, not those of what it calls.
STAMP = sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()

# Kernels make no arrays, they only use those handed in. So they need no reference counts, whose atomic instructions
# took two thirds of the time.
COUNTED = False


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first use, and again when any file of this folder has changed; other threads run meanwhile."""
    compiled = njit(nogil=True, cache=True, _nrt=COUNTED)(function)
    if config.DISABLE_JIT:  # numba's switch for debuggers: then it hands back the function
        return function
    compiled._cache._cache_file._source_stamp = STAMP
    return compiled


def part(function: Callable[..., Any]) -> Any:
    """Compile as a part of each kernel that calls it. A state of thirty arrays is slow to hand over."""
    return njit(nogil=True, _nrt=COUNTED, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def step(function: Callable[..., Any]) -> Any:
    """Compile once, for kernels that call it rarely or in many places."""
    return njit(nogil=True, _nrt=COUNTED, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
