"""Which execution a checkpointed part of a model belongs to, when backward runs it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from foreroute.adapters.hf.checkpointing import CHECKPOINTS_IN, require_prepared, require_unchecked
from foreroute.adapters.overriding import overridden
from foreroute.ep import ExpertLayer
from foreroute.ep.execution import ExecutionStack


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
            require_prepared(layer.path, began_with_grad=False)
            require_unchecked(layer.path)
        return layer(hidden_ND, ids_NK, weights_NK)

    def _checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        execution, ran_before = self._executions.top, False

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal ran_before
            if ran_before:
                with self._executions.on_top(execution), execution.recomputing():
                    return function(*args, **kwargs)
            ran_before = True
            self._open += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._open -= 1

        return checkpoint(run, *args, **kwargs)
