"""Know a tensor again, and that nobody has written to it since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

from torch import Tensor


class TensorIds:
    """Weak references to tensors and their version counters; keeps none alive.

    Collectives of torch.distributed write without counting. Who may be given a buffer that one fills compares values.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._ids = [(ref(tensor), times_written(tensor)) for tensor in tensors]

    def has(self, tensor: Tensor) -> bool:
        """Say whether this is one of them, and unwritten."""
        return any(known() is tensor and times_written(tensor) == times for known, times in self._ids)

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether these are the tensors, and unwritten; in inference mode nobody counts writes."""
        return len(tensors) == len(self._ids) and all(
            known() is tensor and times_written(tensor) == times
            for tensor, (known, times) in zip(tensors, self._ids, strict=True)
        )


def times_written(tensor: Tensor) -> int:
    """Count the writes to the memory of a tensor; 0 in inference mode, where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version
