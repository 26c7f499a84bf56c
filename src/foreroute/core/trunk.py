"""The hooks of a model with one trunk, which is given all tokens of a batch."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .caches import NO_CACHE, FollowedCache, find_cache, given_cache
from .errors import ReplayError
from .hooks import ModelHooks, SelectingRouter, SelectionHook, overridden
from .passes import ForwardArgs
from .untouched import parameters_kept


@dataclass(frozen=True)
class TrunkArgs:
    """Facts in the shapes of a forward's arguments."""

    shape: tuple[int, int]  # (B, T)
    past: int | None  # positions that the key-value cache held already; None without one
    device: torch.device  # of the tokens
    continues: Tensor | None  # bool [], whether positions say that a row continues what no cache holds

    @property
    def num_router_rows(self) -> int:
        return self.shape[0] * self.shape[1]


class TrunkHooks(ModelHooks):
    """The hooks of a model, whose trunk has all its routers."""

    routers: Sequence[SelectingRouter]

    def __init__(
        self,
        model: nn.Module,
        trunk: nn.Module,
        routers: Sequence[SelectingRouter],
        others: Sequence[SelectionHook] = (),
    ) -> None:
        super().__init__(0, trunk, routers, others)
        self.model = model
        self.sizes_2L = torch.tensor([[each.num_experts for each in routers], [each.top_k for each in routers]])
        self.tokens = "input_ids"  # its argument that holds them
        self.names = list(inspect.signature(trunk.forward).parameters)
        self._cache: FollowedCache | None = None
        self._layer_of = {router.selecting[0]: layer for layer, router in enumerate(routers)}
        self._in_modules = [self._layer_of[module] for module in trunk.modules() if module in self._layer_of]

    @property
    def device(self) -> torch.device | None:
        """Device of the routers' weights; None where they have none, or accelerate keeps all offloaded."""
        for router in self.routers:
            for parameter in router.selecting[0].parameters():
                if not parameter.is_meta:
                    return parameter.device
        return None

    def read_args(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArgs:
        """Find the tokens or embeddings of a call, and what its cache, mask and positions say of sequences that go on.

        Raises `ReplayError` when it has neither, or by its mask continues a cache that is not known.
        """
        given = dict(zip(self.names, args, strict=False)) | kwargs
        ids = given.get(self.tokens)
        tokens = ids if isinstance(ids, Tensor) else given.get("inputs_embeds")
        if not isinstance(tokens, Tensor):
            raise ReplayError(
                f"the forward got neither {self.tokens} nor inputs_embeds, so that its rows are not known"
            )
        cache = given_cache(given, ReplayError)
        past = None if cache is None else int(cache.get_seq_length())
        mask = given.get("attention_mask")
        if not past and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > tokens.shape[1]:
            raise ReplayError(
                f"attention_mask is {list(mask.shape)} for {tokens.shape[1]} tokens a sequence, {NO_CACHE}"
            )
        positions, continues = given.get("position_ids"), None
        # a part of longer sequences, as under context parallelism, is run without a cache
        if not past and isinstance(positions, Tensor) and positions.ndim == 2 and given.get("use_cache") is not False:
            continues = (positions != 0).all(-1).any()
        return TrunkArgs((tokens.shape[0], tokens.shape[1]), past, tokens.device, continues)

    def session_contexts(self) -> list[AbstractContextManager[Any]]:
        """Parameters, which must stay, and whatever was compiled on its own with a router in it. See `ModelHooks`.

        Raises `ReplayError` when routers have exchanged their places, which a compiled graph would not notice.
        """
        self._cache, self.awaits_backward = None, False
        self.left_behind.clear()
        contexts: list[AbstractContextManager[Any]] = [
            parameters_kept(self.model, partial(getattr, self, "awaits_backward"), self.left_behind.append)
        ]
        # Dynamo refuses by default to trace a checkpointed region with a function mode in it, because a recomputation
        # would not enter the mode again. It need not: the graph keeps routes. Importing Dynamo would cost seconds.
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            contexts.append(dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True))
        found: list[int] = []
        for path, module in self.trunk.named_modules():
            if module in self._layer_of:
                found.append(self._layer_of[module])
            own = module.__dict__
            # torch.compile(module) makes a wrapper with a `forward` of its own; module.compile() leaves the other
            # attribute
            compiled = "forward" if "dynamo_ctx" in own else "_compiled_call_impl"
            if own.get(compiled) is None:
                continue
            inside = set(module.modules())
            if hooks := [hook for hook in self.every if hook.selecting[0] in inside]:
                contexts.append(overridden(module, compiled, partial(self.run_compiled, path, hooks)))
        for before, now in zip(filter(found.__contains__, self._in_modules), found, strict=True):
            if before != now:
                raise ReplayError(
                    f"router {self.routers[now].path} stands where {self.routers[before].path} stood when the model "
                    "was attached: layers were exchanged since, and routes would follow the modules. Attach again"
                )
        return contexts

    @torch.compiler.disable(recursive=False)  # the host is asked for the rows; what is inside is compiled again
    def run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See `ModelHooks`. A session that records looks at the key-value cache before and after the forward."""
        if self.options.caches:
            self._cache = self._cache or FollowedCache()
            given = dict(zip(self.names, args, strict=False)) | kwargs
            forward = partial(self._cache.run, find_cache(given.values()), forward)
        return super().run_trunk(forward, *args, **kwargs)

    def run_compiled(
        self, path: str, hooks: Sequence[SelectionHook], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer with a graph of its own, in which its router cannot look around."""
        if self.passes and not torch.compiler.is_compiling():
            self.bind_checkpoints(hooks)
        return call(*args, **kwargs)
