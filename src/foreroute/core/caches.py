"""Whether the rows of a key-value cache are still those of the sequences that a recording has seen.

A cache is a list of tensors, whose rows somebody may reorder, select, repeat or crop between two forwards: a beam
search does. Then what a router did for a row of the batch is not what it did for the sequence that stands there later.
Every such change makes new tensors or writes to them, which costs the device nothing to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .errors import ReplayError
from .marks import Marks

CACHES = ("cache", "past_key_values")
"""What models call the argument that holds their cache: transformers from 5.24 on, and before."""


class FollowedCache:
    """The cache of one stack of layers, from forward to forward of a recording."""

    def __init__(self) -> None:
        self._left: Marks | None = None

    def run(self, cache: Any, forward: Callable[[], Any]) -> Any:
        """Run a forward that is given this cache, or None.

        Raises:
            ReplayError: when it continues another cache than the forward before left, or one that was changed since.
        """
        if self._left is not None and cache is not None and not self._left.fit(_tensors(cache)):
            past = int(cache.get_seq_length())
            if past:
                raise ReplayError(
                    f"a forward continues a key-value cache of {past} positions, which is not as the forward before it "
                    "left it: its rows were reordered (as beams are), selected, repeated, cropped or copied, or it is "
                    "of another batch, so that what a router did for a row is not what it did for one sequence. Sample "
                    "with num_beams=1, and record each batch in a session of its own; or record one forward over the "
                    "whole sequences"
                )
        result = forward()
        made = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else ()
        self._left = Marks(_tensors(cache if cache is not None else find_cache(made)))
        return result


def find_cache(values: Iterable[Any]) -> Any:
    """The key-value cache among the arguments or outputs of a forward, whatever its name; None where there is none."""
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


def _tensors(part: Any) -> list[Tensor]:
    """Those of a cache of any class: of its layers, of the caches that it is made of."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, dict):
        part = part.values()
    elif not isinstance(part, list | tuple):
        part = vars(part).values() if hasattr(part, "__dict__") and not callable(part) else ()
    return [tensor for each in part for tensor in _tensors(each)]
