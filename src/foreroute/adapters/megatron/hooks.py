"""The hooks on one chunk of a Megatron-Core model: its trunk, its decoder, its routers, and its checkpoints.

They are put on instances, never on classes or in Megatron's modules: on the forward of the trunk (which tokens), on
that of the decoder (where a pass begins and ends), and on each router (`router_hook`).

A recomputation is bound to the forward that it repeats. When the decoder is done, the checkpoints in its graph are
found, and each is made to push the input of its own pass again whenever it runs its function anew. So any number of
micro-batches may be in flight, in any order, and a backward may run when the session is long closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor

from foreroute.adapters.megatron.discover import Chunk, ChunkRouter
from foreroute.adapters.megatron.forward_args import Call, parameter_names, require_plain
from foreroute.adapters.megatron.route_shard import Share
from foreroute.adapters.megatron.router_hook import TopKRouterHook
from foreroute.errors import ReplayError
from foreroute.replay import ModelHooks, Override, Pass, PassInput, saves_for_checkpoint
from foreroute.trace import RoutingSpec

OWN_CHECKPOINTS = (
    "its recomputation cannot be told which routes to use. Use Megatron's own activation recomputation "
    "(recompute_granularity)"
)


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
    reentrant = (*ModelHooks.reentrant, megatron_random.CheckpointFunction.forward.__code__)

    def __init__(self, chunk: Chunk, number: int, spec: RoutingSpec | None, share: Share) -> None:
        routers = [TopKRouterHook(site, self.run_selecting) for site in chunk.sites]
        modules = (chunk.trunk, chunk.decoder, *(site.module for site in chunk.sites))
        super().__init__(number, chunk.trunk, routers, spec, modules)
        self.counts_all_ranks = any(site.module.get_aux_loss_coeff("global_aux_loss") for site in chunk.sites)
        self._decoder = chunk.decoder
        self._sites = chunk.sites
        self._share = share
        self._names = parameter_names(type(chunk.trunk).forward)[1:]
        self._call: Call | None = None

    def session_overrides(self) -> list[Override]:
        """The trunk and its decoder."""
        return [(self.trunk, "forward", self._run_trunk), (self._decoder, "forward", self._run_decoder)]

    def hook_routers(self) -> Callable[[], None]:
        """On each router, if Megatron's own replay drives none."""
        require_idle(self._sites)
        for router in self.routers:
            router.install()
        return self._unhook

    def _unhook(self) -> None:
        for router in self.routers:
            router.remove()

    def in_checkpoint(self, path: str, current: Pass | None, *, reentrant: bool) -> None:
        """Note that routers run in a reentrant checkpoint, which `after_pass` finds.

        Raises:
            ReplayError: of one that is not reentrant, or holds the whole chunk.
        """
        if current is None:
            raise ReplayError(f"the whole model runs inside a checkpoint; {OWN_CHECKPOINTS}")
        if not reentrant or saves_for_checkpoint():
            raise ReplayError(f"{path} runs inside a non-reentrant torch.utils.checkpoint; {OWN_CHECKPOINTS}")
        current.is_checkpointed = True

    def _run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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

    def after_pass(self, output: Any, current: Pass) -> None:
        """Make every checkpoint below `output` run on the input of its pass again when it recomputes."""
        if not current.is_checkpointed:
            return
        graph = _graph_of(output)
        if not graph:  # everything is frozen, and nothing will be recomputed
            return
        nodes = list(_checkpoints(graph))
        if not nodes:
            raise ReplayError(
                "routers run inside a checkpoint that gradients do not reach, since what comes before it is frozen, or "
                f"of unknown kind: {OWN_CHECKPOINTS}, and let its input require a gradient"
            )
        for node in nodes:
            node.run_function = self._run_again(node.run_function, current.input)

    def _run_again(self, function: Callable[..., Any], first: PassInput) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.recomputing(first) as current:
                result = function(*args, **kwargs)
            self.after_pass(result, current)  # of checkpoints inside of this one, which are made anew each time
            return result

        return run


def require_idle(sites: Sequence[ChunkRouter]) -> None:
    """Raise `ReplayError` if Megatron's own router replay is switched on."""
    for site in sites:
        own: Any = getattr(site.module, "router_replay", None)
        action = getattr(own, "router_replay_action", None)
        if action is not None:
            raise ReplayError(
                f"Megatron's own router replay is active at {site.path} ({action}); clear it with "
                "RouterReplay.clear_global_router_replay_action(), two replays cannot drive one router"
            )


def _graph_of(output: Any) -> list[Any]:
    """The nodes that made the tensors of an output; none where no gradient is asked for."""
    outputs = output if isinstance(output, tuple | list) else (output,)
    return [tensor.grad_fn for tensor in outputs if isinstance(tensor, Tensor) and tensor.grad_fn is not None]


def _checkpoints(graph: list[Any]) -> Iterator[Any]:
    """The nodes of a graph that will run a function again, as Megatron's, Transformer Engine's and torch's do."""
    waiting, seen = list(graph), set()
    # A node is looked at once, however many paths lead to it: residual streams double the paths in every layer.
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "run_function"):
            yield node
        waiting.extend(parent for parent, _ in node.next_functions)
