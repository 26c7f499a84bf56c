"""Whether tensors are the very same as before, and nobody has written to them: the device is not asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

from torch import Tensor


class Marks:
    """Identities and versions of tensors, which do not live longer for it.

    Args:
        tensors: as they are now.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._marks = [(ref(tensor), times_written(tensor)) for tensor in tensors]

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are they, and unwritten; in inference mode, where nobody counts, whether these are they."""
        return len(tensors) == len(self._marks) and all(
            mark() is tensor and times_written(tensor) == times
            for tensor, (mark, times) in zip(tensors, self._marks, strict=True)
        )


def times_written(tensor: Tensor) -> int:
    """How often somebody wrote to the memory of a tensor; 0 in inference mode, where nobody counts."""
    return 0 if tensor.is_inference() else tensor._version
