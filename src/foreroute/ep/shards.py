"""What a rank holds of the model: the experts that live on it, and its part of dense parameters cut by FSDP2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from foreroute.ep.transfer.peers import answered
from foreroute.errors import PlacementError


class ExpertShards:
    """One experts module, of which this rank keeps its home experts, in ascending order of their id.

    Logical order is that of expert ids, whatever rank they live on: row e of a full tensor is expert e.

    Args:
        module: the experts module; its parameters `names` are replaced by their local rows.
        names: of the parameters with an expert axis in front.
        home_E: int16 [E], the rank that every expert lives on.
        group: the ranks.
    """

    def __init__(
        self, module: nn.Module, names: tuple[str, ...], home_E: NDArray[np.int16], group: dist.ProcessGroup
    ) -> None:
        self.module = module
        self.names = names
        self.home_E = home_E
        self._group = group
        self._state_is_allowed = False
        module.register_state_dict_pre_hook(self._refuse_state)
        module.register_load_state_dict_pre_hook(self._refuse_state)
        for name in names:
            full = module.get_parameter(name)
            with torch.no_grad():
                module._parameters[name] = nn.Parameter(self.local(full), requires_grad=full.requires_grad)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank holds, name -> [E / G, ...]."""
        return {name: self.module.get_parameter(name) for name in self.names}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The same, without gradients."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def local(self, full: Tensor) -> Tensor:
        """[E, ...] in logical order to a new [E / G, ...], the rows that live here."""
        here = torch.from_numpy(np.flatnonzero(self.home_E == dist.get_rank(self._group)))
        return full.detach().index_select(0, here.to(full.device))

    def gather(self, local: Tensor) -> Tensor:
        """[E / G, ...] on every rank to a new [E, ...] in logical order, on every rank. A collective call."""
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self._size)]
        with answered("gathering experts", self._group):
            dist.all_gather(parts, local.detach().contiguous(), group=self._group)
        held = torch.from_numpy(np.argsort(self.home_E, kind="stable")).to(local.device)
        full = torch.empty((len(held), *local.shape[1:]), dtype=local.dtype, device=local.device)
        full[held] = torch.cat(parts)
        return full

    @contextmanager
    def state_allowed(self) -> Iterator[None]:
        """Let `state_dict` and `load_state_dict` of the model through, which see this rank's rows."""
        self._state_is_allowed = True
        try:
            yield
        finally:
            self._state_is_allowed = False

    def _refuse_state(self, module: nn.Module, *_: Any) -> None:
        if not self._state_is_allowed:
            raise PlacementError(
                f"{type(module).__name__} holds only the experts that live on this rank, in an order of its own; use "
                "state_dict() and load_state_dict() of the placed model, which all ranks call"
            )

    @property
    def _size(self) -> int:
        return dist.get_world_size(self._group)


def shard_dense(
    model: nn.Module, experts: Sequence[nn.Parameter], paths: Sequence[str], group: dist.ProcessGroup
) -> None:
    """Cut every parameter of a model but experts, block by block. A collective call.

    Gradients of ranks are added up, not averaged: each rank backpropagates its part of one loss.

    Args:
        model: changed in place.
        experts: parameters of this rank, left as they are.
        paths: of the modules with experts, which are in the blocks.
        group: the ranks.
    """
    mesh, ignored = DeviceMesh.from_group(group, experts[0].device.type), set(experts)
    for block in _blocks(model, paths):
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    # resharded after every forward, since a forward without gradients is followed by no backward that does it
    fully_shard(model, mesh=mesh, ignored_params=ignored, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def cut_alike(tensor: Tensor, parameter: DTensor) -> DTensor:
    """This rank's part of a tensor that every rank has whole."""
    return distribute_tensor(
        tensor.detach().to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def _blocks(model: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """The members of the lists of modules that hold experts, dense members among them."""
    lists = {found[0]: None for path in paths if (found := re.split(r"\.\d+\.", path, maxsplit=1))[1:]}
    return [block for path in lists for block in model.get_submodule(path).children()]
