"""Leaving a model as it was: what forwards leave behind is put back, and what cannot be put back is named.

A forward may leave more behind than its output. FSDP2 keeps the weights of its root gathered for a backward; without
one `parameters()` gives other tensors than those that train, and an optimizer made then never moves them. bitsandbytes
packs 4-bit weights again for a kernel without backward. Buffers, counters and random states move.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, torch.dtype, torch.device, Tensor, type(None))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, nothing compiled; whatever forwards leave behind in the model is put back at the end."""
    modules = [(module, _attributes(module), _buffers(module)) for module in model.modules()]
    before = _held(model)
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(range(torch.cuda.device_count())),
            torch.compiler.set_stance("force_eager"),
        ):
            yield
    finally:
        if any(map(_Held.is_replaced, before)):
            _reshard(model)
        for each in before:
            each.put_back()
        for module, attributes, buffers in modules:
            for name in _attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name in module._buffers.keys() - buffers.keys():
                del module._buffers[name]
            for name, (buffer, values) in buffers.items():
                module._buffers[name] = buffer
                if buffer is not None and not buffer.is_meta and not torch.equal(buffer, values):
                    buffer.copy_(values)


@contextmanager
def parameters_kept(
    model: nn.Module, awaits_backward: Callable[[], bool], tell: Callable[[str], None]
) -> Iterator[None]:
    """An optimizer or a loader finds the same parameters after a session as before it.

    Args:
        model: to look through.
        awaits_backward: asked at the end, whether a backward may still come, for which weights stay gathered.
        tell: given what is wrong, when a parameter that trains was replaced; the session may be ending with an error.
    """
    before = _held(model)
    try:
        yield
    finally:
        for each in before:
            if each.is_repacked():  # whatever else moved was moved by whoever runs the session
                each.put_back()
        if not awaits_backward() and any(map(_Held.is_replaced, before)):
            _reshard(model)
            for replaced in filter(_Held.is_replaced, before):
                if replaced.parameter.requires_grad:
                    tell(
                        f"the session leaves another parameter in the place of {replaced.name} of a "
                        f"{type(replaced.module).__name__} than it found there, which an optimizer that was made "
                        "before does not train; change a model outside of sessions"
                    )


class _Held(NamedTuple):
    """A parameter as it was.

    Attributes:
        module, name: where it stands.
        parameter: that stood there.
        data: an alias of it, which keeps its storage.
        state: objects that it carries, such as the scales of packed weights, with the attributes that they had.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter
    data: Tensor
    state: list[tuple[Any, dict[str, Any]]]

    def is_replaced(self) -> bool:
        """Whether another parameter stands there. accelerate makes new ones where it keeps the weights elsewhere."""
        now = self.module._parameters.get(self.name)
        return now is not self.parameter and not (now is not None and now.is_meta)

    def is_repacked(self) -> bool:
        """Whether its values lie otherwise than before, and what it carries says so."""
        return self.module._parameters.get(self.name) is self.parameter and any(
            {name: id(value) for name, value in vars(carried).items()}
            != {name: id(value) for name, value in attributes.items()}
            for carried, attributes in self.state
        )

    def put_back(self) -> None:
        """The parameter, its storage and what it carries, but where DeepSpeed or accelerate move its values."""
        now = self.module._parameters.get(self.name)
        if now is None or any(each.is_meta or not each.numel() for each in (now, self.parameter, self.data)):
            return
        self.module._parameters[self.name] = self.parameter
        if _storages(self.parameter.data) != _storages(self.data):
            self.parameter.data = self.data
        for carried, attributes in self.state:
            vars(carried).clear()
            vars(carried).update(attributes)


def _held(model: nn.Module) -> list[_Held]:
    held = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            carried = [part for part in vars(parameter).values() if _has_state(part)]
            state = [(part, dict(vars(part))) for part in carried]
            held.append(_Held(module, name, parameter, parameter.data, state))
    return held


def _has_state(part: Any) -> bool:
    return hasattr(part, "__dict__") and not callable(part) and not isinstance(part, Tensor)


def _storages(tensor: Tensor) -> list[tuple[Any, ...]]:
    """Shape, dtype and storage of a tensor, or of those that one of a subclass wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [each for part in parts if isinstance(part, Tensor) for each in _storages(part)]
    return [(tensor.shape, tensor.dtype, tensor.untyped_storage()._cdata)]


def _reshard(model: nn.Module) -> None:
    """Have FSDP2 take back the weights that it keeps gathered for a backward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain attributes of the instance: counters, caches, flags."""
    return {name: value for name, value in module.__dict__.items() if isinstance(value, PLAIN)}


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Buffers of the module itself, with copies of their values."""
    return {name: (buffer, None if buffer is None else buffer.clone()) for name, buffer in module._buffers.items()}
