"""Which execution a checkpointed part of a model belongs to, when backward runs it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from foreroute.adapters.hf.model import CHECKPOINTS_IN, require_prepared
from foreroute.ep import ExpertLayer
from foreroute.ep.execution import Execution, ExecutionStack
from foreroute.replay import overridden, told_apart


class Recomputing:
    """Puts an execution back in force around every recomputation of a part of its forward.

    Args:
        model: whose parts are checkpointed.
        executions: of the model.
    """

    def __init__(self, model: nn.Module, executions: ExecutionStack) -> None:
        self._model = model
        self._executions = executions
        self._open = 0

    @contextmanager
    def captured(self) -> Iterator[None]:
        """While the context is open, checkpoints remember the execution in which they were made."""
        with ExitStack() as stack:
            for module in self._model.modules():
                for name in CHECKPOINTS_IN:
                    if callable(module.__dict__.get(name)):
                        stack.enter_context(overridden(module, name, self._checkpoint))
            yield

    def guarded(self, layer: ExpertLayer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The layer, refusing checkpoints that remember nothing."""
        return partial(self._run, layer)

    def _run(self, layer: ExpertLayer, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        now = self._executions.top
        if now.active_plan is not None and not now.is_recomputing and not self._open:
            require_prepared(layer.path)
        return layer(hidden_ND, ids_NK, weights_NK)

    def _checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        again = partial(self._again, self._executions.top)
        return checkpoint(told_apart(function, self._first, again), *args, **kwargs)

    @contextmanager
    def _first(self) -> Iterator[None]:
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    @contextmanager
    def _again(self, execution: Execution) -> Iterator[None]:
        with self._executions.on_top(execution), execution.recomputing():
            yield
