"""The hooks on one chunk of a Megatron-Core model: its trunk, its decoder, and its routers.

They are put on instances, never on classes or in Megatron's modules: on the forward of the trunk (which tokens), on
that of the decoder (where a pass begins and ends), and on each router (`router_hook`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from foreroute.adapters.megatron.discover import Chunk
from foreroute.adapters.megatron.forward_args import Call, parameter_names, require_plain
from foreroute.adapters.megatron.route_shard import Share
from foreroute.adapters.megatron.router_hook import TopKRouterHook
from foreroute.core.hooks import ModelHooks, overridden
from foreroute.errors import ReplayError
from foreroute.trace import RoutingSpec


class ChunkHooks(ModelHooks):
    """The hooks of one chunk.

    Args:
        chunk: with routers or without.
        number: which chunk of its rank this is.
        spec: its experts and routed layers; None where it has no routers.
        share: of the rows, on this rank.

    Attributes:
        counts_all_ranks: whether a loss counts tokens over data-parallel ranks, which must do it alike whoever of them
            has padding.
    """

    routers: Sequence[TopKRouterHook]

    def __init__(self, chunk: Chunk, number: int, spec: RoutingSpec | None, share: Share) -> None:
        routers = [TopKRouterHook(site) for site in chunk.sites]
        modules = (chunk.trunk, chunk.decoder, *(site.module for site in chunk.sites))
        super().__init__(number, chunk.trunk, routers, modules)
        self.spec = spec
        self.counts_all_ranks = any(site.module.get_aux_loss_coeff("global_aux_loss") for site in chunk.sites)
        self._decoder = chunk.decoder
        self._sites = chunk.sites
        self._share = share
        self._names = parameter_names(type(chunk.trunk).forward)[1:]
        self._call: Call | None = None

    def session_contexts(self) -> list[AbstractContextManager[None]]:
        """The trunk and its decoder."""
        trunk = overridden(self.trunk, "forward", self._run_trunk)
        return [trunk, overridden(self._decoder, "forward", self._run_decoder)]

    def _run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.passes.is_again:
            return forward(*args, **kwargs)
        self.sessions.require_mine("runs a model")
        if not self.listeners:  # another thread closed its session when this one was about to be refused
            return forward(*args, **kwargs)
        before, self._call = self._call, Call.read(self.trunk, self._share, self._names, args, kwargs)
        try:
            return forward(*args, **kwargs)
        finally:
            self._call = before

    def _run_decoder(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.run_pass(self._current_call, partial(forward, *args, **kwargs))

    def _current_call(self) -> Call:
        if self._call is None:
            raise ReplayError("the decoder ran outside a forward of its model; call the model that was attached")
        require_plain(self._call)
        return self._call
