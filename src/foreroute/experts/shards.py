"""The experts of one layer that live on this rank, and the layer as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.errors import PlacementError
from foreroute.experts.waiting import answered


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
