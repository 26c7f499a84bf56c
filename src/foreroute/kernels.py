"""How loops are compiled, once on a machine: numba keeps what it compiled on disk.

numba compiles a kernel anew when the file that the kernel stands in has changed. It looks at no other file, though it
inlines functions and constants of others, and takes no notice of how it is set to compile. Nobody changes the files of
an installed package; `make` empties the cache when it has changed those of a checkout.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import uint64

F = TypeVar("F", bound=Callable[..., Any])
_PART = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile on first use, and keep the result where numba can keep it.

    A decorator, with or without arguments. Other threads run while a kernel runs.

    Args:
        function: at the top of its module.
        **options: of `numba.njit`.
    """
    if function is None:
        return lambda function: kernel(function, **options)
    # nothing calls kernels as C functions
    options = {"nogil": True, "no_cfunc_wrapper": True, **options}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder can be written: each process compiles for itself
        return numba.njit(**options)(function)


def routine(function: F) -> F:
    """Compile for kernels that call it rarely or in many places.

    It only uses arrays that are handed in, so it needs no reference counts, whose atomic instructions take long.
    """
    compiled: F = numba.njit(**_PART)(function)
    return compiled


def inlined(function: F) -> F:
    """As `routine`, but within the code of each caller: a state of many arrays is slow to hand over."""
    compiled: F = numba.njit(forceinline=True, **_PART)(function)
    return compiled


NONE = cast(int, np.int64(-1))
"""No rank, no expert. A plain number would be a type of its own, and what it is handed to compiled once more."""

# Random words for compiled loops: a generator is one uint64, and gives the same words on every machine.
SHIFT_32 = uint64(32)
LOW_32 = uint64(0xFFFFFFFF)
TO_UNIT = 1.0 / (1 << 32)


@kernel
def next_word(state: Any) -> Any:
    """Advance a splitmix64 generator (Steele, Lea and Flood, OOPSLA 2014). `state` is uint64 [1]."""
    state[0] += uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> uint64(27))) * uint64(0x94D049BB133111EB)
    return z ^ (z >> uint64(31))


@kernel
def next_unit(state: Any) -> float:
    """A float64 from 0 to below 1."""
    return float(next_word(state) >> SHIFT_32) * TO_UNIT
