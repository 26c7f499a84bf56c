"""A device that this machine does not have, with real values on it.

Tensors of `DEVICE` hold their values on the CPU and say that they are on the meta device, whose backward torch runs in
the thread that asks for it. Whoever mixes them with tensors of the CPU is refused, by the rules of CUDA: a tensor
without axes may be on the CPU, and so may indices. Reads by the host are counted where they would wait for a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
"""Device that the tensors are on."""

CPU = torch.device("cpu")

aten = torch.ops.aten
INDICES_ANYWHERE = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
INDICES_ANYWHERE |= {aten._index_put_impl_.default}
COPIES = {aten.copy_.default, aten._to_copy.default}
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default}
READS |= {aten.masked_select.default, aten.repeat_interleave.Tensor, aten._unique2.default, aten.unique_dim.default}

_DATA: Any = torch.Tensor.data


class OnDevice(torch.Tensor):
    """One of them.

    Attributes:
        values_here: its values, on the CPU.
    """

    values_here: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.values_here = values
        return made

    @property
    def data(self) -> torch.Tensor:
        data: torch.Tensor = _DATA.__get__(self)
        return data

    @data.setter
    def data(self, new: Any) -> None:
        _DATA.__set__(self, new)
        self.values_here = new.values_here

    def data_ptr(self) -> int:
        """Give the address of its values."""
        return self.values_here.data_ptr()

    def tolist(self) -> Any:
        """Read by the host."""
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.values_here!r})"


class MixedDevicesError(RuntimeError):
    """Mix of devices that CUDA would refuse."""


class OtherDevice(TorchDispatchMode):
    """While it is open, tensors can be made on `DEVICE`.

    Attributes:
        reads: how often the host waited for the device, by the operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.reads)


class _Generator(torch.Generator):
    """A generator of either device: draws are the same."""

    unsaid: ClassVar[torch.device] = CPU
    said: torch.device

    def __new__(cls, device: torch.device | str | None = None) -> _Generator:
        made: _Generator = super().__new__(cls)
        made.said = cls.unsaid if device is None else torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.said


@contextmanager
def other_device(*, generators: torch.device = CPU) -> Iterator[OtherDevice]:
    """The device, with a count of reads. Generators are on the one given, unless they are asked for elsewhere."""
    _Generator.unsaid = generators
    with (
        patch.object(torch, "Generator", _Generator),
        patch.object(torch, "is_autocast_enabled", _is_autocast_enabled),
        OtherDevice() as device,
    ):
        yield device


def _is_autocast_enabled(device: str = "cuda", asked: Callable[[str], bool] = torch.is_autocast_enabled) -> bool:
    """Torch has none on the meta device, and fails when it is asked; transformers before 5.6 asks."""
    return device != DEVICE.type and asked(device)


def _run(func: Any, args: Any, kwargs: Any, reads: Counter[str] | None = None) -> Any:
    given = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in given if isinstance(tensor, OnDevice)]
    named = kwargs.get("device")
    goes_there = named is not None and torch.device(named).type == DEVICE.type
    if there and func not in COPIES:
        _require_one_device(func, args, given)
    if reads is not None and there:
        _count(func, args, kwargs, goes_there, reads)
    elif reads is not None and goes_there and func is aten._to_copy.default and not kwargs.get("non_blocking"):
        reads["to the device"] += 1
    plain_args, plain_kwargs = _mapped(_plain, (args, kwargs))
    if goes_there:
        plain_kwargs["device"] = torch.device("cpu")
    if func is aten.histc.default and not plain_args[0].is_floating_point():  # CUDA counts integers
        result = func(plain_args[0].double(), *plain_args[1:], **plain_kwargs).to(plain_args[0].dtype)
    else:
        result = func(*plain_args, **plain_kwargs)
    if goes_there and func is aten._to_copy.default:
        result = _mapped(lambda t: t.clone() if t is plain_args[0] else t, result)
    stays = bool(there) and not (func is aten._to_copy.default and named is not None)
    if func is aten.copy_.default:
        return args[0]
    if not (stays or goes_there):
        return result
    same = {id(tensor.values_here): tensor for tensor in there}

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return same[id(leaf)] if id(leaf) in same else OnDevice(leaf)

    return _mapped(wrapped, result)


# torch's own trees know other containers, which no operator takes, and cost more than most operators
def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Change every leaf of what an operator is given or gives."""
    container = type(value)
    if container is tuple or container is list:
        return container([_mapped(change, each) for each in value])
    if container is dict:
        return {name: _mapped(change, each) for name, each in value.items()}
    return change(value)


def _leaves(value: Any) -> list[Any]:
    """List the leaves of what an operator is given."""
    found: list[Any] = []
    _mapped(found.append, value)
    return found


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, OnDevice):
        return leaf.values_here
    # `torch.tensor([], device=...)` comes here as a tensor of torch's own meta device
    is_empty = isinstance(leaf, torch.Tensor) and leaf.device == DEVICE and not leaf.numel()
    return torch.empty(leaf.shape, dtype=leaf.dtype) if is_empty else leaf


def _require_one_device(func: Any, args: Sequence[Any], given: Sequence[Any]) -> None:
    looked_at = given
    if func in INDICES_ANYWHERE:
        looked_at = [leaf for place, part in enumerate(args) if place != 1 for leaf in _leaves(part)]
        if not isinstance(args[0], OnDevice):
            looked_at = given
    strays = [t for t in looked_at if isinstance(t, torch.Tensor) and t.device != DEVICE and t.dim()]
    if strays:
        raise MixedDevicesError(f"{func}: expected all tensors on one device, found {list(strays[0].shape)} on the CPU")


def _count(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], goes_there: bool, reads: Counter[str]) -> None:
    if func in READS and kwargs.get("output_size") is None:  # given, a size need not be asked for
        reads[str(func)] += 1
    elif func is aten._to_copy.default and kwargs.get("device") is not None and not goes_there:
        reads["to the host"] += 1
    elif func is aten.copy_.default and not all(isinstance(each, OnDevice) for each in args[:2]):
        if not (len(args) > 2 and args[2]):
            reads["copy between devices"] += 1
    elif func in INDICES_ANYWHERE and any(
        isinstance(index, OnDevice) and index.dtype in (torch.bool, torch.uint8) for index in _leaves(args[1])
    ):
        reads[f"{func} by a mask"] += 1
