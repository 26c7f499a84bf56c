"""Operators where a compiled model meets the host: one operator before a pass and one after it.

Finding the rows of a batch is work for the host: a batch that does not fit is refused. Traced into a graph it would
break it. So a compiled forward calls `foreroute::begin_pass`, which hands it the routes as tensors, and
`foreroute::end_pass`, which takes what was observed. The graph depends on the shape of the batch and on nothing in the
trace. Both operators write to a ledger, which keeps them in order and from being optimised away.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from foreroute.adapters.hf.forward_tokens import ForwardTokens

if TYPE_CHECKING:
    from foreroute.adapters.hf.routed_transformer import TransformerHooks


_hooks: WeakValueDictionary[str, TransformerHooks] = WeakValueDictionary()
_numbers = itertools.count()  # said as words: Dynamo makes a number symbolic when a second model has another


def register(hooks: TransformerHooks) -> str:
    """Name the hooks of a model, by which operators, which take tensors, numbers and words, find them."""
    name = str(next(_numbers))
    _hooks[name] = hooks
    return name


@torch.library.custom_op("foreroute::begin_pass", mutates_args=("ledger",), tags=(torch.Tag.cudagraph_unsafe,))
def begin_pass(
    name: str,
    ledger: Tensor,
    input_ids: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    cumulative: Tensor | None,
    digests: Tensor | None,
    past: int,
    counted: Tensor | None,
    begins: bool,
    is_masked: bool,
    keeps_cache: bool,
) -> Tensor:
    """Begin a pass, by `TransformerHooks.begin_from_graph`. A static cache has counted its positions in a tensor."""
    ledger.add_(1)
    past = past if counted is None else int(counted)
    batch = ForwardTokens(
        input_ids,
        mask,
        positions,
        cumulative,
        past,
        begins=begins,
        cache_was_seen=False,
        is_masked=is_masked,
        keeps_cache=keeps_cache,
    )
    batch.digests_BT = digests
    return _hooks[name].begin_from_graph(batch)


@begin_pass.register_fake
def _(name: str, ledger: Tensor, input_ids: Tensor, *_: object) -> Tensor:
    shape, dtype = _hooks[name].shapes_for_graph(input_ids.shape[0] * input_ids.shape[1])
    return input_ids.new_empty(shape, dtype=dtype)


@torch.library.custom_op("foreroute::end_pass", mutates_args=("ledger",), tags=(torch.Tag.cudagraph_unsafe,))
def end_pass(name: str, ledger: Tensor, calls_L: Tensor, observed: list[Tensor]) -> None:
    """End it, by `TransformerHooks.end_from_graph`."""
    ledger.add_(1)
    _hooks[name].end_from_graph(calls_L, observed)


@end_pass.register_fake
def _(name: str, ledger: Tensor, calls_L: Tensor, observed: list[Tensor]) -> None:
    return None
