"""Standing between a chunk and its routers while hooks are in place, and nowhere near it otherwise.

Overridden on instances, never on classes or in Megatron's modules: the forward of the trunk (which tokens), that of the
decoder (where a pass begins and ends), and each router (`seat`). What a router does is decided by the pass on top of
the chunk's stack, pushed by the decoder's forward.

A recomputation is bound to the forward that it repeats. When the decoder is done, the checkpoints in its graph are
found, and each is made to push the input of its own pass again whenever it runs its function anew. So any number of
micro-batches may be in flight, in any order, and a backward may run when the session is long closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import RLock
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from foreroute.adapters.megatron.call import Call, parameter_names, require_plain
from foreroute.adapters.megatron.discover import Chunk
from foreroute.adapters.megatron.passes import (
    OWN_CHECKPOINTS,
    Listener,
    Orders,
    Pass,
    PassInput,
    require_each_router_once,
    slots_of,
)
from foreroute.adapters.megatron.refusals import require_idle
from foreroute.adapters.megatron.seat import Seat
from foreroute.adapters.overriding import ATTACHED_TWICE, is_hooked, overridden, uncopyable
from foreroute.adapters.recomputation import runs_without_gradients_in
from foreroute.errors import ReplayError
from foreroute.replay import OneThread, PassStack, Watch
from foreroute.trace import RoutingSpec

REENTRANT = (torch_checkpoint.CheckpointFunction.forward.__code__, megatron_random.CheckpointFunction.forward.__code__)
"""Forwards of the checkpoints that run their function without gradients first."""


class Interceptor:
    """The hooks of one chunk.

    Args:
        chunk: with routers or without.
        number: which chunk of its rank this is.
        spec: its experts and routed layers; None where it has no routers, so that its passes replay nothing.
        sequence_ranks: ranks that share the rows of a micro-batch by sequence parallelism.
    """

    def __init__(self, chunk: Chunk, number: int, spec: RoutingSpec | None, sequence_ranks: int) -> None:
        self.number = number
        self._chunk = chunk
        self._spec = spec
        self._sequence_ranks = sequence_ranks
        self._seats = [Seat(site, position) for position, site in enumerate(chunk.sites)]
        self._paths = [site.path for site in chunk.sites]
        # this loss counts tokens over data-parallel ranks, which must do it alike whoever of them has padding
        self._counts_all_ranks = any(site.module.get_aux_loss_coeff("global_aux_loss") for site in chunk.sites)
        self._names = parameter_names(type(chunk.trunk).forward)[1:]
        self._listeners: list[Listener] = []
        self._sessions = OneThread("has a record() or replay() session open on it")
        self._passes = PassStack[Pass](self._seats)
        self._call: Call | None = None
        self._installed = ExitStack()
        self._users = 0
        self._lock = RLock()  # backwards of other threads recompute while sessions open and close

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Keep the hooks in place, and `listener` informed, while the context is open.

        Raises:
            ReplayError: when another thread has a session open, this model was attached once more and that has, or
                Megatron's own router replay is active.
        """
        with self._sessions.held("opens a session on a model"), self._hooks():
            if not self._listeners:
                self._installed = self._install()
            self._listeners.append(listener)
            try:
                yield
            finally:
                self._listeners.remove(listener)
                if not self._listeners:
                    self._installed.close()

    def _install(self) -> ExitStack:
        """Hooks of a session beside those on routers."""
        trunk = self._chunk.trunk
        with ExitStack() as stack:
            stack.enter_context(overridden(trunk, "forward", self._run_trunk))
            stack.enter_context(overridden(self._chunk.decoder, "forward", self._run_decoder))
            for module in (trunk, self._chunk.decoder, *(site.module for site in self._chunk.sites)):
                stack.enter_context(uncopyable(module))
            return stack.pop_all()

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Have the seats taken until the last user leaves."""
        if not self._listeners and is_hooked(self._chunk.trunk):
            raise ReplayError(ATTACHED_TWICE)
        with self._lock:
            if not self._users:
                require_idle(self._chunk.sites)
                for seat in self._seats:
                    seat.take(self._require_own_thread, self._on_call)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    for seat in self._seats:
                        seat.leave()

    def _on_call(self, position: int) -> None:
        self._passes.top.note_call(position, self._paths[position])

    def _require_own_thread(self, path: str) -> None:
        """Raise `ReplayError` if the router runs in a forward that began before another thread opened its session."""
        self._passes.require_own_thread(path)
        if not self._passes:
            self._sessions.require_mine(f"runs {path} of a model")

    def _run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._sessions.require_mine("runs a model")
        if not self._listeners:  # another thread closed its session when this one was about to be refused
            return forward(*args, **kwargs)
        before, self._call = self._call, Call.read(self._names, args, kwargs)
        try:
            return forward(*args, **kwargs)
        finally:
            self._call = before

    def _run_decoder(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if not self._listeners:
            return forward(*args, **kwargs)
        if call is None:
            raise ReplayError("the decoder ran outside a forward of its model; call the model that was attached")
        require_plain(call)
        listeners, device = list(self._listeners), next(self._chunk.trunk.parameters()).device
        given = [listener.begin(self.number, call, device) for listener in listeners]
        if self._spec is None:
            return forward(*args, **kwargs)
        if runs_without_gradients_in(*REENTRANT):
            raise ReplayError(f"the whole model runs inside a checkpoint; {OWN_CHECKPOINTS}")
        orders = next((each for each in given if each is not None), None)
        current = self._input(self._spec, orders, call, device).open()
        with self._passes.on_top(current):
            result = forward(*args, **kwargs)
        if not self._users:
            raise ReplayError("the session was closed in the middle of a forward; close it when the model has returned")
        require_each_router_once(self._paths, current.calls)
        if current.is_checkpointed:
            self._rearm(result, current.input)
        for listener in listeners:
            listener.end(self.number, call, current.notes)
        return result

    def _input(self, spec: RoutingSpec, orders: Orders | None, call: Call, device: torch.device) -> PassInput:
        watch = Watch()
        for listener in self._listeners:
            watch |= listener.watch
        slots = slots_of(self._chunk.trunk, call, self._sequence_ranks)
        if orders is not None and self._counts_all_ranks:
            orders = replace(orders, is_padded=True)
        return PassInput(spec, orders, slots, device, watch)

    def _rearm(self, output: Any, first: PassInput) -> None:
        """Make every checkpoint below `output` run on the input of its pass again when it recomputes."""
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
            node.run_function = self._rearmed(node.run_function, first)

    def _rearmed(self, function: Callable[..., Any], first: PassInput) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            current = first.open(recompute=True)
            with self._passes.on_top(current), self._hooks():
                result = function(*args, **kwargs)
            if current.is_checkpointed:  # by a checkpoint inside of this one, which is made anew each time
                self._rearm(result, first)
            return result

        return run


def _graph_of(output: Any) -> list[Any]:
    """The nodes that made the tensors of an output; none where no gradient is asked for."""
    outputs = output if isinstance(output, tuple | list) else (output,)
    return [tensor.grad_fn for tensor in outputs if isinstance(tensor, Tensor) and tensor.grad_fn is not None]


def _checkpoints(graph: list[Any]) -> Iterator[Any]:
    """The nodes of a graph that will run a function again, as Megatron's, Transformer Engine's and torch's do."""
    waiting, seen = list(graph), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "run_function"):
            yield node
        waiting.extend(parent for parent, _ in node.next_functions)
