"""The hooks on one stack of layers of a model in torch: its trunk, its routers, and what was compiled on its own.

A forward of the trunk is one pass over [B, T] positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .caches import FollowedCache
from .errors import ReplayError
from .hooks import ModelHooks
from .overrides import Override, SelectionHook
from .passes import Pass, RouterHook


@dataclass(frozen=True)
class TrunkArgs:
    """What the shapes of a forward's arguments say.

    Attributes:
        shape: (B, T).
        past: positions that the key-value cache held already; None without one.
        device: of the tokens.
    """

    shape: tuple[int, int]
    past: int | None
    device: torch.device

    @property
    def num_slots(self) -> int:
        """B · T."""
        return self.shape[0] * self.shape[1]

    @classmethod
    def of_call(cls, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrunkArgs:
        """Of a call whose parameters have these names. Raises `ReplayError` when it has no tokens or embeddings."""
        given = dict(zip(names, args, strict=False)) | kwargs
        tokens = next((t for n in ("input_ids", "inputs_embeds") if isinstance(t := given.get(n), Tensor)), None)
        if tokens is None:
            raise ReplayError("the forward got neither input_ids nor inputs_embeds, so that its rows are not known")
        cache: Any = given.get("past_key_values")
        past = None if cache is None else int(cache.get_seq_length())
        return cls((tokens.shape[0], tokens.shape[1]), past, tokens.device)


class TrunkHooks(ModelHooks):
    """The hooks of one stack.

    Args:
        chunk: which stack of the model this is.
        trunk: the module whose forward is one pass.
        routers: in the order in which they run.
        others: other modules that select.
    """

    def __init__(
        self, chunk: int, trunk: nn.Module, routers: Sequence[RouterHook], others: Sequence[SelectionHook] = ()
    ) -> None:
        every: list[SelectionHook] = [*routers, *others]
        super().__init__(chunk, trunk, routers, list({trunk, *(hook.selecting[0] for hook in every)}), others)
        self.names = list(inspect.signature(trunk.forward).parameters)
        self._cache = FollowedCache()
        self._layer_of = {router.selecting[0]: layer for layer, router in enumerate(routers)}
        self._in_modules = [self._layer_of[module] for module in trunk.modules() if module in self._layer_of]

    def session_overrides(self) -> list[Override]:
        """The trunk, and whatever was compiled on its own with a router in it.

        Raises:
            ReplayError: when routers have exchanged their places, which a compiled graph would not notice.
        """
        self._cache = FollowedCache()
        overrides: list[Override] = [(self.trunk, "forward", self.run_trunk)]
        every: list[SelectionHook] = [*self.routers, *self.others]
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
            if hooks := [hook for hook in every if hook.selecting[0] in inside]:
                overrides.append((module, compiled, partial(self.run_compiled, path, hooks)))
        for before, now in zip((layer for layer in self._in_modules if layer in found), found, strict=True):
            if before != now:
                raise ReplayError(
                    f"router {self.routers[now].path} stands where {self.routers[before].path} stood when the model "
                    "was attached: layers were exchanged since, and routes would follow the modules. Attach again"
                )
        return overrides

    @torch.compiler.disable(recursive=False)  # the host is asked for the rows; what is inside is compiled again
    def run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward of the trunk as one pass."""
        call = partial(forward, *args, **kwargs)
        if self.watch.caches:
            call = self.along_cache(call, args, kwargs)
        return self.run_pass(partial(TrunkArgs.of_call, self.names, args, kwargs), call)

    def along_cache(self, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> partial[Any]:
        """A call of the trunk with these arguments that looks at its cache, before and after it."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        return partial(self._cache.run, given.get("past_key_values"), call)

    def run_compiled(
        self, path: str, hooks: Sequence[SelectionHook], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer with a graph of its own, in which its router cannot look around."""
        if self.passes and not torch.compiler.is_compiling():
            self.bind_checkpoints(hooks)
        return call(*args, **kwargs)

    def after_pass(self, current: Pass) -> None:
        """Nothing follows the trunk that needs its selection."""
