"""A device that counts: it computes on the host, and notes each launch and each time the host would wait for it.

It stands in for a GPU where there is none. Its tensors are of another device than the host's, so that every copy
between the two is seen, as it is on a GPU. What it cannot see: waits that no operator makes, such as those for an
event, and how many kernels a GPU takes for one operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.counting import Counts, place

NAME = "stand_in"
OWN_FILES = (str(Path(torch.__file__).parent), __file__)
COPIES = ("aten::_to_copy", "aten::copy_")
WAITING = frozenset(
    {
        *("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::bincount"),
        *("aten::nonzero", "aten::masked_select", "aten::repeat_interleave"),
        *("aten::_unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"),
    }
)
"""Operators whose result the host must have before it goes on: a number, or the size of what comes out."""
INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_"})
NO_KERNEL = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
        *("aten::_unsafe_view", "aten::_reshape_alias", "aten::detach", "aten::lift_fresh"),
    }
)


@cache
def stand_in_device() -> torch.device:
    """The device. Registers it in this process, which then has an accelerator, on the first call."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


class StandInTensor(Tensor):
    """A tensor that says it is on the device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> StandInTensor:
        made: StandInTensor = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=stand_in_device(),
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Only a `Counting` mode computes."""
        raise AssertionError(f"{func} ran on the device outside of Counting")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Counting(TorchDispatchMode):
    """Runs everything that is asked of the device while it is open, and counts it in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator on what the tensors hold."""
        given = {} if kwargs is None else dict(kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        on_device = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, StandInTensor)}
        stays = bool(on_device)
        if given.get("device") is not None:
            stays = given["device"].type == NAME
            given["device"] = torch.device("cpu")
        if on_device or stays:
            self._count(func, args, given, tensors, stays=stays)
        held_args, held_given = pytree.tree_map(_held, (args, given))
        result = func(*held_args, **held_given)
        if not stays:
            return result
        return pytree.tree_map(lambda leaf: _on_device(leaf, on_device), result)

    def _count(self, func: Any, args: Any, given: dict[str, Any], tensors: list[Tensor], *, stays: bool) -> None:
        name = func._schema.name
        crosses = not all(isinstance(tensor, StandInTensor) for tensor in tensors) or not stays
        waits = name in WAITING and given.get("output_size") is None
        if name in COPIES:
            blocking = not (given.get("non_blocking") or (name == "aten::copy_" and args[2:3] == (True,)))
            waits = crosses and blocking
        elif name in INDEXING:  # by a mask: its size must be known; by indices of the host: they are copied first
            indices = [each for each in args[1] if each is not None]
            waits = any(each.dtype in (torch.bool, torch.uint8) for each in indices) or any(
                not isinstance(each, StandInTensor) for each in indices
            )
        if waits:
            self.counts.waits.append(_place())
        if not func.is_view and name not in NO_KERNEL:
            self.counts.launches += 1

    def count(self, work: Callable[[], object]) -> Counts:
        """What one call does, with this mode open."""
        self.counts = Counts()
        work()
        found, self.counts = self.counts, Counts()
        return found


def move_to_stand_in(model: nn.Module) -> None:
    """Put parameters and buffers on the device, without gradients."""
    with Counting():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(StandInTensor(parameter.data), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = StandInTensor(buffer)


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, StandInTensor) else leaf


def _on_device(leaf: Any, known: dict[int, StandInTensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    same = known.get(id(leaf))  # what an operator changed in place
    return StandInTensor(leaf) if same is None else same


def _place() -> str:
    """The line that asked, outside of torch."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.f_back
    return "somewhere" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)
