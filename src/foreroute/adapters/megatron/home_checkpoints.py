"""Checkpoints while experts are away: in logical order where their format can say so, refused where it cannot.

`megatron.core.dist_checkpointing` is told of every tensor where it lies in the whole model. An expert is said to lie at
its logical id, wherever it is. State of optimizers that is derived from the tensors of the model follows. So a run with
other homes, or without foreroute, reads what it expects. Every other format holds what lies in the memory of a rank, in
the order in which it lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from numpy.typing import NDArray
from torch.optim import Optimizer

from foreroute.adapters.megatron.discover import ChunkRouter
from foreroute.adapters.megatron.expert_parameters import torch_optimizer
from foreroute.errors import PlacementError

HOMES = "foreroute_homes"
"""Key of the homes that a sharded state dict was made for. It is not stored, and tells what `dist_checkpointing.load`
filled from state dicts of other formats, whose order nobody knows."""
RESHARDABLE = "fully_reshardable"
"""The format of the distributed optimizer that says of each tensor whose it is."""
NOT_AT_HOME = (
    "are not where Megatron built them, and this state dict has them in the order of a rank's memory. Save and load "
    "sharded_state_dict() of model and optimizer with megatron.core.dist_checkpointing, or bring the experts back "
    "first, routed.move_homes(routed.block_home_LE, optimizer), on all ranks, and move them again when the checkpoint "
    "is written or loaded"
)


class ExpertsCheckpoint:
    """Stands, on the instance, in the state dicts of one layer's experts while they are away, at homes int16 [E]."""

    def __init__(self, site: ChunkRouter, home_E: NDArray[np.int16]) -> None:
        self._path, self._home_E = site.path, home_E
        # the logical expert of each local expert, those of rank 0 first
        self._order_E = np.argsort(home_E, kind="stable").tolist()
        self._experts = site.block.experts
        self._sharded_state_dict = self._experts.sharded_state_dict
        self._handles = [
            self._experts.register_state_dict_pre_hook(self._refuse),
            self._experts.register_load_state_dict_pre_hook(self._require_shards),
        ]
        self._experts.__dict__["sharded_state_dict"] = self._in_logical_order

    def remove(self) -> None:
        del self._experts.__dict__["sharded_state_dict"]
        for handle in self._handles:
            handle.remove()

    def _in_logical_order(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        found: dict[str, Any] = self._sharded_state_dict(
            prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )
        to_logical: Callable[[Any], Any]
        if (metadata or {}).get("singleton_local_shards", False):
            to_logical = partial(self._rename, f"{prefix}experts.")
        else:
            to_logical = partial(self._displace, len(sharded_offsets))
        dict_list_map_inplace(to_logical, found)
        return found | {prefix + HOMES: LocalNonpersistentObject(self._home_E)}

    def _displace(self, axis: int, shard: Any) -> Any:
        # experts are an axis of their own, before those of the tensor
        if isinstance(shard, ShardedTensorFactory):
            build = shard.build_fn
            shard.build_fn = lambda *args: dict_list_map_inplace(partial(self._displace, axis), build(*args))
        else:
            offset = list(shard.global_offset)
            offset[axis] = self._order_E[offset[axis]]
            shard.global_offset = tuple(offset)
        return shard

    def _rename(self, head: str, shard: ShardedBase) -> ShardedBase:
        # each expert has keys of its own
        local_expert, _, name = shard.key.removeprefix(head).partition(".")
        shard.key = f"{head}{self._order_E[int(local_expert)]}.{name}"
        return shard

    def _refuse(self, *_: Any) -> NoReturn:
        raise PlacementError(f"the experts of {self._path} {NOT_AT_HOME}")

    def _require_shards(self, _: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if not np.array_equal(state.pop(prefix + HOMES, None), self._home_E):
            self._refuse()


class OptimizerCheckpoint:
    """Stands, on the instance, in the state dicts of an optimizer from the first move of the experts that it trains."""

    # `part` is of torch or of Megatron, and no chain; `away_LE` gives where experts live, None while they are at home
    def __init__(self, part: Any, away_LE: Callable[[], NDArray[np.int16] | None]) -> None:
        self._away_LE = away_LE
        self._reads_shards = False
        inner = torch_optimizer(part)
        if isinstance(inner, Optimizer):
            inner.register_state_dict_pre_hook(self._refuse)
            inner.register_load_state_dict_pre_hook(self._refuse)
        if isinstance(part, MegatronOptimizer):
            part.__dict__["sharded_state_dict"] = partial(self._sharded, part.sharded_state_dict)
            part.__dict__["load_state_dict"] = partial(self._load, part.load_state_dict)
        if isinstance(part, DistributedOptimizer):
            for name in ("get_parameter_state_dp_zero", "load_parameter_state_from_dp_zero"):
                part.__dict__[name] = partial(self._unless_refused, getattr(part, name))

    def _sharded(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._shards():
            found = inner(*args, **kwargs)
        home_LE = self._away_LE()
        if home_LE is None:
            return found
        sharding = found.get("param_state_sharding_type", RESHARDABLE)
        if sharding != RESHARDABLE:
            raise PlacementError(
                f"the distributed optimizer keeps its state as {sharding}, which does not say of each tensor whose it "
                "is, and its experts are not where Megatron built them; pass metadata={'distrib_optim_sharding_type': "
                f"'{RESHARDABLE}'}} (--dist-ckpt-optim-fully-reshardable)"
            )
        return found | {HOMES: LocalNonpersistentObject(home_LE)}

    def _load(self, inner: Callable[..., None], state: dict[str, Any]) -> None:
        if not self._reads_shards:  # making a sharded state dict loads another one, to have state at all
            state = dict(state)
            made_for_LE, home_LE = state.pop(HOMES, None), self._away_LE()
            if not (made_for_LE is None if home_LE is None else np.array_equal(made_for_LE, home_LE)):
                self._raise_away()
        with self._shards():
            inner(state)

    def _unless_refused(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._refuse()
        return inner(*args, **kwargs)

    def _refuse(self, *_: Any) -> None:
        if not self._reads_shards and self._away_LE() is not None:
            self._raise_away()

    def _raise_away(self) -> NoReturn:
        raise PlacementError(f"experts of this optimizer {NOT_AT_HOME}")

    @contextmanager
    def _shards(self) -> Iterator[None]:
        # Megatron's sharded state dicts are made of and loaded by plain ones, which are then no refusal's business
        before, self._reads_shards = self._reads_shards, True
        try:
            yield
        finally:
            self._reads_shards = before
