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
def untouched(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """Eval mode, no gradients, nothing compiled; whatever forwards leave behind in the model is put back at the end.

    Gives a function that goes back to the mode that the modules were in, and says whether that is another.
    """
    modules = [(module, _attributes(module), _buffers(module)) for module in model.modules()]
    standing = _parameters(model)
    values = [_Values.of(parameter) for *_, parameter in standing]
    trained = {module for module in model.modules() if module.training}
    model.eval()

    def in_training() -> bool:
        if trained:
            model.train()  # which may replace more than flags
        for module in model.modules():
            module.training = module in trained
        return bool(trained)

    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(range(torch.cuda.device_count())),
            torch.compiler.set_stance("force_eager"),
        ):
            yield in_training
    finally:
        if _replaced(standing):
            reshard(model)
        for module, name, parameter in _replaced(standing):
            now = module._parameters.get(name)
            if (now is None or not _is_elsewhere(now)) and not _is_elsewhere(parameter):
                module._parameters[name] = parameter
        for each in values:
            each.put_back()
        for module, attributes, buffers in modules:
            for name in _attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
            for name in module._buffers.keys() - buffers.keys():
                del module._buffers[name]
            for name, (buffer, before) in buffers.items():
                module._buffers[name] = buffer
                if buffer is None or before is None or buffer.is_meta:
                    continue
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextmanager
def parameters_kept(
    model: nn.Module, awaits_backward: Callable[[], bool], tell: Callable[[str], None]
) -> Iterator[None]:
    """Keep the parameters that an optimizer or a loader finds in a model.

    `awaits_backward` says at the end whether a backward may still come, for which weights stay gathered. `tell` is
    given what is wrong when a parameter that trains was replaced: the session may be ending with an error already.
    """
    # every session does this, so that only parameters that carry something cost more than a look
    standing = _parameters(model)
    carrying = [_Values.of(each) for *_, each in standing if vars(each)]
    try:
        yield
    finally:
        for each in carrying:
            if each.is_repacked():  # whatever else moved was moved by whoever runs the session
                each.put_back()
        if not awaits_backward() and _replaced(standing):
            reshard(model)
            for module, name, parameter in _replaced(standing):
                now = module._parameters.get(name)
                if parameter.requires_grad and (now is None or not _is_elsewhere(now)):
                    path = next(path for path, each in model.named_modules() if each is module)
                    why = "change a model outside of sessions"
                    if _is_sharded(parameter):
                        why = (
                            "FSDP2 gathered it for a backward that did not come: attach the module that fully_shard "
                            "was called on last"
                        )
                    tell(
                        f"the session leaves another parameter in the place of {path}.{name} than it found there, so "
                        f"that an optimizer made before or after it trains the wrong one; {why}"
                    )


class _Values(NamedTuple):
    """Former place of the values of a parameter."""

    parameter: nn.Parameter
    data: Tensor  # an alias of it, which keeps its storage
    carried: list[tuple[Any, dict[str, Any]]]  # such as the scales of packed weights, with the attributes they had

    @classmethod
    def of(cls, parameter: nn.Parameter) -> _Values:
        parts = [part for part in vars(parameter).values() if _has_state(part)]
        return cls(parameter, parameter.data, [(part, dict(vars(part))) for part in parts])

    def is_repacked(self) -> bool:
        """Say whether its bytes have another shape or dtype than before, and what it carries says so."""
        # what it carries is not enough: DeepSpeed's parameters carry the optimizer, which a step moves
        now, was = self.parameter.data, self.data
        if now.nbytes != was.nbytes or (now.shape, now.dtype) == (was.shape, was.dtype):
            return False
        return any(
            {name: id(value) for name, value in vars(part).items()}
            != {name: id(value) for name, value in attributes.items()}
            for part, attributes in self.carried
        )

    def put_back(self) -> None:
        """Put back storage and what is carried, but where DeepSpeed or accelerate move the values."""
        if _is_elsewhere(self.parameter) or _is_elsewhere(self.data):
            return
        is_repacked = self.is_repacked()
        if _storages(self.parameter.data) != _storages(self.data):
            self.parameter.data = self.data
        for part, attributes in self.carried if is_repacked else ():
            vars(part).clear()
            vars(part).update(attributes)


_Standing = list[tuple[nn.Module, str, nn.Parameter]]
"""Parameters with their places."""


def _parameters(model: nn.Module) -> _Standing:
    every = ((module, name, each) for module in model.modules() for name, each in module._parameters.items())
    return [(module, name, each) for module, name, each in every if each is not None]


def _replaced(standing: _Standing) -> _Standing:
    """Find the parameters in whose place others stand now."""
    return [
        (module, name, parameter)
        for module, name, parameter in standing
        if (now := module._parameters.get(name)) is not parameter
        and not (_is_sharded(now) and not _is_sharded(parameter))  # a backward gave back what was gathered before
    ]


def _is_sharded(tensor: Tensor | None) -> bool:
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def _is_elsewhere(tensor: Tensor) -> bool:
    """Say whether accelerate, with a new parameter each time, or DeepSpeed keeps the values elsewhere."""
    return tensor.is_meta or not tensor.numel()


def _has_state(part: Any) -> bool:
    return hasattr(part, "__dict__") and not callable(part) and not isinstance(part, Tensor)


def _storages(tensor: Tensor) -> list[tuple[Any, ...]]:
    return [(part.shape, part.dtype, part.untyped_storage()._cdata) for part in plain_tensors(tensor)]


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield what holds the values of a tensor: itself, or what a subclass wraps, as DTensors and quantizers' do."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        if isinstance(part := getattr(tensor, name), Tensor):  # a DTensor also names its mesh
            yield from plain_tensors(part)


def reshard(model: nn.Module) -> None:
    """Have FSDP take back the weights that it keeps gathered for a backward, its root's too, which may be around."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    modules = list(model.modules()) if fsdp is not None else []
    sharded = [module for module in modules if isinstance(module, fsdp.FSDPModule)]
    # a root knows all that share it
    states = sharded[0]._get_fsdp_state()._state_ctx.all_states if sharded else ()
    around = [module for state in states for module in state._modules]
    for module in dict.fromkeys([*sharded, *around]):
        module.reshard()
    for module in modules:  # the first FSDP has no door for it: so it does itself behind a forward
        if isinstance(module, fsdp.FullyShardedDataParallel) and module._handle is not None:
            fsdp._runtime_utils._reshard(module, module._handle, True)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Give plain attributes of the instance: counters, caches, flags; and its forward."""
    # a change of mode replaces the forward: transformers takes other kernels in `eval()`, some without a backward
    return {name: each for name, each in module.__dict__.items() if isinstance(each, PLAIN) or name == "forward"}


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Give the buffers of the module itself, with copies of their values."""
    return {name: (buffer, None if buffer is None else buffer.clone()) for name, buffer in module._buffers.items()}
