"""Standing between a model and its routers while a session is open, and nowhere near it otherwise.

Three things are overridden on instances, never on classes, and put back when the last session closes: the forward of
the trunk (to know where one pass over a batch begins and ends), the forward of each router (to watch or force its
selection), and the activation-checkpointing function of each layer (to know which pass a recomputation belongs to).

What a router does is decided by the pass on top of a per-model stack. A pass is pushed when the trunk's forward begins
and popped when it ends. A checkpointed layer keeps the pass it ran in, and pushes it again around its recomputation, so
that a backward may run after the session has closed, or between the forwards of other micro-batches, and still sees its
own rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from foreroute.adapters.hf.batch import Batch
from foreroute.adapters.hf.discover import RouterSite
from foreroute.adapters.hf.selection_mode import Selection
from foreroute.errors import ReplayError
from foreroute.replay import ReplayRows


class Listener:
    """What a session wants to know and to decide. The default does nothing."""

    def begin(self, batch: Batch) -> ReplayRows | None:
        """A pass over `batch` begins. Returns the routes to force on it, or None."""
        return None

    def selected(self, layer: int, selection: Selection) -> None:
        """The router at position `layer` has selected."""

    def end(self, batch: Batch) -> None:
        """The pass is over and every router selected once in it."""


@dataclass(eq=False)
class Pass:
    """One forward over one batch, or the recomputation of a part of it.

    Attributes:
        batch: the tokens.
        rows: the routes to force, or None where routers choose themselves.
        calls: how often each router has selected.
        with_grad: whether gradients were recorded when the pass began.
        recompute: whether this is a recomputation in backward, which is not counted or recorded again.
    """

    batch: Batch
    rows: ReplayRows | None
    calls: list[int]
    with_grad: bool
    recompute: bool = False


class Interceptor:
    """The hooks of one model.

    Args:
        trunk: the module whose forward is one pass.
        sites: the routers, in layer order.
        finals: which top-k of each router's forward is its selection.
    """

    def __init__(self, trunk: nn.Module, sites: list[RouterSite], finals: list[int]) -> None:
        self._trunk = trunk
        self._sites = sites
        self._finals = finals
        self._signature = inspect.signature(trunk.forward)
        self._listeners: list[Listener] = []
        self._passes: list[Pass] = []
        self._installed = False
        self._checkpoints_open = 0

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Keep the hooks in place, and `listener` informed, while the context is open."""
        with self._hooks(whole=True):
            self._listeners.append(listener)
            try:
                yield
            finally:
                self._listeners.remove(listener)

    @contextmanager
    def _hooks(self, *, whole: bool) -> Iterator[None]:
        """Put the hooks in place, unless they are, and take them away again; only those of routers if not `whole`."""
        if self._installed:
            yield
            return
        with ExitStack() as stack:
            self._installed = True
            stack.callback(setattr, self, "_installed", False)
            for layer, site in enumerate(self._sites):
                stack.enter_context(overridden(*site.selecting, partial(self._run_router, layer)))
            if whole:
                stack.enter_context(overridden(self._trunk, "forward", self._run_trunk))
                for module in self._trunk.modules():
                    if "_gradient_checkpointing_func" in module.__dict__:
                        name = "_gradient_checkpointing_func"
                        stack.enter_context(overridden(module, name, self._run_checkpoint))
            yield

    def _run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = Batch.of_call(self._signature, args, kwargs)
        listeners = list(self._listeners)
        forced = [rows for rows in (listener.begin(batch) for listener in listeners) if rows is not None]
        current = Pass(batch, forced[0] if forced else None, [0] * len(self._sites), torch.is_grad_enabled())
        with self._on_top(current):
            result = forward(*args, **kwargs)
        self._require_each_router_once(current)
        for listener in listeners:
            listener.end(batch)
        return result

    def _run_router(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = self._current(layer)
        with self._sites[layer].plan.mode(self._finals[layer], current.rows, layer) as mode:
            result = forward(*args, **kwargs)
        if len(mode.seen) != self._finals[layer] + 1:
            raise ReplayError(
                f"router {self._sites[layer].path} made {len(mode.seen)} top-k selections, but "
                f"{self._finals[layer] + 1} when it was attached; its forward takes another path now. Attach again"
            )
        if len(mode.seen[-1].ids_RK) != current.batch.input_ids_BT.size:
            raise ReplayError(
                f"router {self._sites[layer].path} saw {len(mode.seen[-1].ids_RK)} of the "
                f"{current.batch.input_ids_BT.size} positions of the batch; a router that sees only the text of it "
                "cannot be recorded or replayed"
            )
        if not current.recompute:
            current.calls[layer] += 1
            for listener in self._listeners:
                listener.selected(layer, mode.seen[-1])
        return result

    def _run_checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not self._passes:
            return checkpoint(function, *args, **kwargs)
        return checkpoint(self._rearmed(function, self._passes[-1]), *args, **kwargs)

    def _rearmed(self, function: Callable[..., Any], first: Pass) -> Callable[..., Any]:
        """A checkpointed function that runs within its own pass again whenever it is recomputed."""
        again = Pass(first.batch, first.rows, first.calls, first.with_grad, recompute=True)
        ran_before = False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran_before
            if ran_before:
                with self._hooks(whole=False), self._on_top(again):
                    return function(*args, **kwargs)
            ran_before = True
            self._checkpoints_open += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._checkpoints_open -= 1

        return run

    def _current(self, layer: int) -> Pass:
        if not self._passes:
            raise ReplayError(
                f"router {self._sites[layer].path} ran outside a forward of {type(self._trunk).__name__}; call the "
                "model that was attached, not a part of it"
            )
        current = self._passes[-1]
        if not current.recompute and not self._checkpoints_open and _in_checkpoint(current):
            raise ReplayError(
                f"router {self._sites[layer].path} runs inside torch.utils.checkpoint called by hand, whose "
                "recomputation cannot be told which routes to use. Use the model's own activation checkpointing "
                "(model.gradient_checkpointing_enable()), switched on before the session is opened"
            )
        return current

    def _require_each_router_once(self, current: Pass) -> None:
        for site, calls in zip(self._sites, current.calls, strict=True):
            if calls != 1:
                why = "its rows would be consumed twice" if calls else "a fused kernel or another branch bypassed it"
                raise ReplayError(
                    f"router {site.path} selected {calls} times in one forward, expected once: {why}. "
                    "Its routes cannot be recorded or replayed in this configuration"
                )

    @contextmanager
    def _on_top(self, current: Pass) -> Iterator[None]:
        self._passes.append(current)
        try:
            yield
        finally:
            self._passes.pop()


def _in_checkpoint(current: Pass) -> bool:
    """Whether a recomputation that `_run_checkpoint` has not prepared will follow."""
    if current.with_grad and not torch.is_grad_enabled():  # use_reentrant=True runs its first forward without
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", "")


@contextmanager
def overridden(module: nn.Module, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let `wrapper(original, ...)` stand in for an attribute of the instance; restore exactly what was there."""
    own = module.__dict__
    had_own, original = name in own, getattr(module, name)

    @wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    own[name] = stand_in
    try:
        yield
    finally:
        if had_own:
            own[name] = original
        else:
            del own[name]
