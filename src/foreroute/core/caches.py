"""Check that the rows of a key-value cache are still those of the sequences that a recording has seen.

A cache is a list of tensors, whose rows somebody may reorder, select, repeat or crop between two forwards: a beam
search does. Then what a router did for a row of the batch is not what it did for the sequence that stands there later.
Every such change makes new tensors or writes to them, which costs the device nothing to see.

One change is none of that: positions cut off at the end, as drafts are that a sampler rejects. What is left is the same
memory, seen in part and not written to, so that every position before is that of the same sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import ReplayError
from .tensor_ids import times_written

CACHES = ("cache", "past_key_values")
"""Names of the argument that holds a model's cache: transformers from 5.24 on, and before."""
NO_CACHE = (
    "so that the forward seems to continue a key-value cache, which was not recognised: pass one of transformers, "
    "which says by get_seq_length() how many positions it holds, as past_key_values or cache"
)
"""Ends the message about a forward that begins in the middle of its sequences."""
COUNTS = (torch.int32, torch.int64)


class FollowedCache:
    """Cache of one model as the forward before left it, in a recording. No cache lives longer for it."""

    def __init__(self) -> None:
        self._views: list[_View] | None = None
        self._length: Any = 0

    def run(self, cache: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward that is given this cache, or None. It may have been cut at its end.

        Raises `ReplayError` when it continues another cache than the forward before left, or one changed since.
        """
        if cache is not None and not self._fits(cache) and (past := int(cache.get_seq_length())):
            raise ReplayError(
                f"a forward continues a key-value cache of {past} positions, which is not as the forward before it "
                "left it, nor that without its end: its rows were reordered (as beams are), selected, repeated, "
                "written to or copied, or it is of another batch, so that the recorded rows would mix sequences. "
                "Sample with num_beams=1, and record each batch in a session of its own; "
                "or record one forward over the whole sequences"
            )
        result = forward(*args, **kwargs)
        made = result if isinstance(result, dict | tuple) else getattr(result, "__dict__", {})
        left = cache if cache is not None else find_cache(made.values() if isinstance(made, dict) else made)
        length = 0 if left is None else left.get_seq_length()
        # a static cache counts in a tensor on the device, to which it writes
        self._length = length.clone() if isinstance(length, Tensor) else length
        self._views = list(map(_View, _tensors(left)))
        return result

    def _fits(self, cache: Any) -> bool:
        """Say whether this is what was left, or that without positions at its end; of the first forward, whatever."""
        if self._views is None:
            return True
        tensors = _tensors(cache)
        if len(tensors) != len(self._views):
            return False
        pairs = list(zip(self._views, tensors, strict=True))
        if all(view.is_of(tensor) and view.has_shape(tensor) for view, tensor in pairs):
            return True
        past, length = int(cache.get_seq_length()), int(self._length)
        is_static = any(_is_count(tensor) and not view.is_of(tensor) for view, tensor in pairs)

        def is_left(view: _View, tensor: Tensor) -> bool:
            if not view.is_of(tensor):
                return _is_count(tensor) and int(tensor) == past
            may_be_whole = past == length or is_static or not view.holds(length)
            return view.has_shape_without(tensor, length - past) or (may_be_whole and view.has_shape(tensor))

        return past <= length and all(starmap(is_left, pairs))


class _View:
    """Part of memory that a tensor shows, and the writes to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = _memory_of(tensor)
        self._shape, self._begin = tensor.shape, tensor.storage_offset()

    def is_of(self, tensor: Tensor) -> bool:
        """Say whether a tensor shows the same memory, by the same strides, to which nobody has written since."""
        return self._memory == _memory_of(tensor)

    def has_shape(self, tensor: Tensor) -> bool:
        return (self._shape, self._begin) == (tensor.shape, tensor.storage_offset())

    def holds(self, num: int) -> bool:
        """Say whether it has as many positions, where keys and values have theirs."""
        return self._shape[-2:-1] == (num,)

    def has_shape_without(self, tensor: Tensor, num_cut: int) -> bool:
        """Say whether a tensor shows all but `num_cut` positions at the end, and some at the beginning of a window."""
        # positions are along one axis, which is not the first: that has sequences
        changed = [axis for axis, num in enumerate(tensor.shape) if num != self._shape[axis]]
        if len(changed) != 1 or not changed[0]:
            return False
        [axis] = changed
        begin = self._shape[axis] - num_cut - tensor.shape[axis]
        return begin >= 0 and tensor.storage_offset() - self._begin == begin * tensor.stride(axis)


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    # the address of a storage is not used again while a weak reference to it lives
    return StorageWeakRef(tensor.untyped_storage()), tensor.stride(), tensor.dtype, times_written(tensor)


def _is_count(tensor: Tensor) -> bool:
    """Say whether a static cache counts its positions in it."""
    return tensor.dtype in COUNTS and not tensor.ndim


def find_cache(values: Iterable[Any]) -> Any:
    """Find the key-value cache among the arguments or outputs of a forward, whatever its name; None without one."""
    return next((value for value in values if hasattr(value, "get_seq_length")), None)


def given_cache(given: Mapping[str, Any], error: type[Exception]) -> Any:
    """Find the key-value cache among named arguments. Raises `error` for what stands in its place and is none."""
    cache = find_cache(given.values())
    for name in CACHES if cache is None else ():
        if given.get(name) is not None:
            raise error(
                f"{name} is a {type(given[name]).__name__}; expected a cache of transformers, which says by "
                "get_seq_length() how many positions it holds"
            )
    return cache


def named_cache(output: Mapping[str, Any]) -> dict[str, Any]:
    """Find the key-value cache in an output, by the name that the next forward takes it by; empty without one."""
    return {name: value for name, value in output.items() if hasattr(value, "get_seq_length")}


def _tensors(part: Any) -> list[Tensor]:
    """Collect the tensors of a cache of any class: of its layers, of the caches that it is made of."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, dict):
        part = part.values()
    elif not isinstance(part, list | tuple):
        part = vars(part).values() if hasattr(part, "__dict__") and not callable(part) else ()
    return [tensor for each in part for tensor in _tensors(each)]
