"""Where a compiled model meets the host: one operator before a pass and one after it.

Finding the rows of a batch is work for the host: a batch that does not fit is refused. Traced into a graph it would
break it. So a compiled forward calls `foreroute::begin_pass`, which hands it the routes as tensors, and
`foreroute::end_pass`, which takes what was observed. The graph depends on the shape of the batch and on nothing in the
trace. Both operators write to a ledger, which keeps them in order and from being optimised away.
"""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Host(Protocol):
    """The hooks of a model, which the operators call."""

    def begin_from_graph(
        self,
        input_ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        cumulative: Tensor | None,
        digests: Tensor | None,
        past: int,
        begins: bool,
    ) -> Tensor:
        """Begin a compiled pass, and return `Rows.ids_LRK`, empty without replay."""

    def end_from_graph(self, calls_L: Tensor, observed: list[Tensor]) -> None:
        """End it, with what routers observed."""

    def shapes_for_graph(self, num_slots: int) -> tuple[list[int], torch.dtype]:
        """Say shape and dtype of the ids that `begin_from_graph` returns."""


_hosts: WeakValueDictionary[str, Host] = WeakValueDictionary()
_numbers = itertools.count()  # said as words: Dynamo makes a number symbolic when a second model has another


def register(host: Host) -> str:
    """Name a host, so that operators find it for as long as it lives: they take tensors, numbers and words."""
    name = str(next(_numbers))
    _hosts[name] = host
    return name


@torch.library.custom_op("foreroute::begin_pass", mutates_args=("ledger",), tags=(torch.Tag.cudagraph_unsafe,))
def begin_pass(
    host: str,
    ledger: Tensor,
    input_ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    cumulative: Tensor | None,
    digests: Tensor | None,
    past: int,
    counted: Tensor | None,
    begins: bool,
) -> Tensor:
    """Locate the rows of a batch; see `Host.begin_from_graph`. A static cache has counted its positions in a tensor."""
    ledger.add_(1)
    past = past if counted is None else int(counted)
    return _hosts[host].begin_from_graph(input_ids, mask, positions, cumulative, digests, past, begins)


@begin_pass.register_fake
def _(
    host: str,
    ledger: Tensor,
    input_ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    cumulative: Tensor | None,
    digests: Tensor | None,
    past: int,
    counted: Tensor | None,
    begins: bool,
) -> Tensor:
    shape, dtype = _hosts[host].shapes_for_graph(input_ids.shape[0] * input_ids.shape[1])
    return input_ids.new_empty(shape, dtype=dtype)


@torch.library.custom_op("foreroute::end_pass", mutates_args=("ledger",), tags=(torch.Tag.cudagraph_unsafe,))
def end_pass(host: str, ledger: Tensor, calls_L: Tensor, observed: list[Tensor]) -> None:
    """Hand over what routers observed; see `Host.end_from_graph`."""
    ledger.add_(1)
    _hosts[host].end_from_graph(calls_L, observed)


@end_pass.register_fake
def _(host: str, ledger: Tensor, calls_L: Tensor, observed: list[Tensor]) -> None:
    return None
