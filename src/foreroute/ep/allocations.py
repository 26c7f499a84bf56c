"""Bytes of tensors, as an operator after the other takes them and gives them back."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SETTLING_S = 0.005
"""Threads of gloo let go of what they sent this long, and longer, behind what waits for it."""


class LoggedSection(NamedTuple):
    """Bytes above those at the begin of the log, at its own begin and behind each allocation."""

    name: tuple[str, int | None]
    begin: int
    after: list[int]


class AllocationLog(TorchDispatchMode):
    """Follows the memory of all tensors of a device that operators make while it is open.

    It sees blocks of tensors: neither what an operator takes and gives back inside, nor what an allocator keeps.

    Attributes:
        sections: what was seen, in order; `begin` opens the next one.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.sections: list[LoggedSection] = []
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._device, self._bytes, self._sent = device.type, 0, False

    @property
    def current(self) -> tuple[str, int | None]:
        """The section that is open."""
        return self.sections[-1].name

    def begin(self, part: str, layer: int | None = None) -> None:
        """Open the next section."""
        self.sections.append(LoggedSection((part, layer), self._bytes, []))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Log while the context is open."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            found = resize(storage, size)
            if storage.device.type == self._device:
                self._see(storage)
            return found

        collects = gc.isenabled()
        gc.collect()
        gc.disable()  # what a collection would free, it frees at any time
        # FSDP's way, which is no operator
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            if collects:
                gc.enable()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its local tensors come next
        if self._sent:
            time.sleep(SETTLING_S)
        out = func(*args, **(kwargs or {}))
        self._sent = func.namespace == "c10d"
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if self._has_memory(each)}
        for each in tree_leaves(out):
            if self._has_memory(each):
                storage = each.untyped_storage()
                # what was there before is neither taken nor given back here
                if storage._cdata in self._sizes or storage._cdata not in given:
                    self._see(storage)
        return out

    def _see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        before, ref = self._sizes.get(key, (None, None))
        if before == size:
            return
        self._sizes[key] = size, ref or weakref.ref(storage, lambda _: self._forget(key))
        self._bytes += size - (before or 0)
        self.sections[-1].after.append(self._bytes)

    def _forget(self, key: int) -> None:
        self._bytes -= self._sizes.pop(key)[0]

    def _has_memory(self, leaf: Any) -> bool:
        # subclasses, such as those by which DTensor finds shapes, have none of their own
        return type(leaf) in (Tensor, torch.nn.Parameter) and leaf.device.type == self._device
