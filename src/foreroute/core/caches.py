"""Whether tensors are still those that were seen: the rows of a key-value cache, and what a router returned.

A cache is a list of tensors, whose rows somebody may reorder, select, repeat or cut between two forwards: a beam search
does. Then what a router did for a row of the batch is not what it did for the sequence that stands there later.
Every such change makes new tensors or writes to them, which costs the device nothing to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import ReplayError

CACHES = ("cache", "past_key_values")
"""What models call the argument that holds their cache: transformers from 5.24 on, and before."""
NO_CACHE = (
    "so that the forward seems to continue a key-value cache, which was not recognised: pass one of transformers, "
    "which says by get_seq_length() how many positions it holds, as past_key_values or cache"
)
"""Ends the message about a forward that begins in the middle of its sequences."""


class TensorIds:
    """Weak references to tensors and their version counters; keeps none alive.

    Collectives of torch.distributed write without counting. Who may be given a buffer that one fills compares values.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._ids = [(ref(tensor), times_written(tensor)) for tensor in tensors]

    def has(self, tensor: Tensor) -> bool:
        """Whether this is one of them, and unwritten."""
        return any(known() is tensor and times_written(tensor) == times for known, times in self._ids)

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are they, and unwritten; in inference mode, where nobody counts, whether these are they."""
        return len(tensors) == len(self._ids) and all(
            known() is tensor and times_written(tensor) == times
            for tensor, (known, times) in zip(tensors, self._ids, strict=True)
        )


def times_written(tensor: Tensor) -> int:
    """Count the writes to the memory of a tensor; 0 in inference mode, where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


class FollowedCache:
    """What the forward before left of the cache of one model, in a recording. No cache lives longer for it."""

    def __init__(self) -> None:
        self._left: list[tuple[Any, ...]] | None = None

    def run(self, cache: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a forward that is given this cache, or None.

        Raises `ReplayError` when it continues another cache than the forward before left, or one changed since.
        """
        is_left = cache is None or self._left in (None, list(map(_memory_of, _tensors(cache))))
        if not is_left and (past := int(cache.get_seq_length())):
            raise ReplayError(
                f"a forward continues a key-value cache of {past} positions, which is not as the forward before it "
                "left it: its rows were reordered (as beams are), selected, repeated, cut (as drafts are that a "
                "sampler rejects), written to or copied, or it is of another batch, so that the recorded rows would "
                "mix sequences. Sample with num_beams=1 and without assisted decoding, and record each batch in a "
                "session of its own; or record one forward over the whole sequences"
            )
        result = forward(*args, **kwargs)
        made = result if isinstance(result, dict | tuple) else getattr(result, "__dict__", {})
        left = cache if cache is not None else find_cache(made.values() if isinstance(made, dict) else made)
        self._left = list(map(_memory_of, _tensors(left)))
        return result


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Say which part of which memory a tensor shows, and how often that was written to."""
    # the address of a storage is not used again while a weak reference to it lives
    memory = StorageWeakRef(tensor.untyped_storage())
    return memory, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, times_written(tensor)


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
