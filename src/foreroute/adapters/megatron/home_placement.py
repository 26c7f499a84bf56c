"""Experts that live elsewhere than Megatron puts them: where their tokens go, and what checkpoints hold meanwhile.

A router goes on in logical experts: its weights, bias, counters and losses, what is recorded and what is replayed. Its
map and its weights have a column for each expert. The columns are put in the order of the ranks' local experts where
the MoE layer gives them to its dispatcher.

`megatron.core.dist_checkpointing` is told of every tensor where it lies in the whole model. An expert is said to lie at
its logical id, wherever it is. State of optimizers that is derived from the tensors of the model follows. So a run with
other homes, or without foreroute, reads what it expects. Every other format holds what lies in the memory of a rank, in
the order in which it lies there, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from foreroute.adapters.megatron.discover import ChunkRouter, objection_to_output
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


class MovedExperts:
    """Stands, on the instances, in the dispatch of one MoE layer and in the state dicts of its experts."""

    def __init__(self, site: ChunkRouter, home_E: NDArray[np.int16]) -> None:
        # the expert-parallel rank of every expert; a rank has its own in ascending order
        self.home_E = home_E
        self._site, self._experts = site, site.block.experts
        # the logical expert of each local expert, those of rank 0 first
        self._order_E = torch.from_numpy(np.argsort(home_E, kind="stable"))
        self._logical = self._order_E.tolist()
        self._preprocess, self._sharded_state_dict = site.block.preprocess, self._experts.sharded_state_dict
        self._handles = [
            self._experts.register_state_dict_pre_hook(self._refuse),
            self._experts.register_load_state_dict_pre_hook(self._require_shards),
        ]
        self._experts.__dict__["sharded_state_dict"] = self._in_logical_order
        site.block.__dict__["preprocess"] = self

    def __call__(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        """Dispatch as `MoELayer.preprocess` does, by `probs` and a bool `routing_map` [N, E] in order of experts."""
        if objection := objection_to_output(self._site, probs, routing_map):
            raise PlacementError(f"{objection}. Homes cannot be moved in this configuration")
        if self._order_E.device != probs.device:
            self._order_E = self._order_E.to(probs.device)
        in_order = probs.index_select(1, self._order_E), routing_map.index_select(1, self._order_E)
        return self._preprocess(hidden_states, *in_order)

    def remove(self) -> None:
        del self._site.block.__dict__["preprocess"], self._experts.__dict__["sharded_state_dict"]
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
        dict_list_map_inplace(partial(self._displace, len(sharded_offsets)), found)
        return found | {prefix + HOMES: LocalNonpersistentObject(self.home_E)}

    def _displace(self, axis: int, shard: Any) -> Any:
        # experts are an axis of their own, before those of the tensor
        if isinstance(shard, ShardedTensorFactory):
            build = shard.build_fn
            shard.build_fn = lambda *args: dict_list_map_inplace(partial(self._displace, axis), build(*args))
        else:
            offset = list(shard.global_offset)
            offset[axis] = self._logical[offset[axis]]
            shard.global_offset = tuple(offset)
        return shard

    def _refuse(self, *_: Any) -> NoReturn:
        raise PlacementError(f"the experts of {self._site.path} {NOT_AT_HOME}")

    def _require_shards(self, _: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if not np.array_equal(state.pop(prefix + HOMES, None), self.home_E):
            self._refuse()


def moved_experts(site: ChunkRouter) -> MovedExperts | None:
    found = site.block.__dict__.get("preprocess")
    return found if isinstance(found, MovedExperts) else None


def set_home(site: ChunkRouter, home_E: NDArray[np.int16], block_home_E: NDArray[np.int16]) -> None:
    """Have a layer send tokens to these homes, int16 [E], where Megatron has built its experts at `block_home_E`."""
    if (before := moved_experts(site)) is not None:
        before.remove()
    if not np.array_equal(home_E, block_home_E):
        MovedExperts(site, home_E)


def guard_shards(trunk: Any, *, away: bool) -> None:
    """Have a chunk refuse `singleton_local_shards` while experts of the model, of whichever stage, are away.

    On all ranks alike: one that did not refuse would wait in the collective save for those that did.
    """
    guard = trunk.__dict__.get("sharded_state_dict")
    is_guarded = isinstance(guard, partial) and guard.func is _without_singletons
    if away and not is_guarded:
        trunk.__dict__["sharded_state_dict"] = partial(_without_singletons, trunk.sharded_state_dict)
    elif is_guarded and not away:
        del trunk.__dict__["sharded_state_dict"]


def _without_singletons(
    inner: Callable[..., Any],
    prefix: str = "",
    sharded_offsets: tuple[tuple[int, int, int], ...] = (),
    metadata: dict[str, Any] | None = None,
) -> Any:
    if (metadata or {}).get("singleton_local_shards"):
        raise PlacementError(
            "experts of the model are not where Megatron built them, and singleton_local_shards would name each by "
            "where it is; set it to False"
        )
    return inner(prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata)


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
