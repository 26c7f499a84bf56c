"""How the loops of this folder are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

import foreroute.kernels

# Kernels make no arrays, they only use those handed in. So they need no reference counts, whose atomic instructions
# took two thirds of the time.
COUNTED = False


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first use, and keep what is compiled; other threads run meanwhile."""
    return foreroute.kernels.kernel(function, _nrt=COUNTED)


def part(function: Callable[..., Any]) -> Any:
    """Compile as a part of each kernel that calls it. A state of thirty arrays is slow to hand over."""
    return njit(nogil=True, _nrt=COUNTED, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def step(function: Callable[..., Any]) -> Any:
    """Compile once, for kernels that call it rarely or in many places."""
    return njit(nogil=True, _nrt=COUNTED, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
