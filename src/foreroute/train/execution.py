"""What stages ask of the execution of a policy, and the execution by one process. `expert_parallel.py` has several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from foreroute.adapters.hf import RoutedTransformer
from foreroute.trace import RoutingTrace
from foreroute.train.optimizer import load_state
from foreroute.train.ranks import Ranks
from foreroute.train.schedule import Stage


class PolicyExecution(Protocol):
    """An execution runs the forwards and backwards of a policy. All ranks make the same calls.

    Attributes:
        ranks: of the run.
    """

    ranks: Ranks

    def state_dict(self) -> Mapping[str, Tensor]:
        """Give the weights of the whole policy."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Give the state dict of the optimizer as one process with the whole policy would have it."""

    def load(self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Take up the weights and the optimizer state of a whole policy."""

    def plan(self, first: int, routes: RoutingTrace, stages: Sequence[Stage]) -> None:
        """Announce stages, in their order, and the routes to replay; `first` optimizer steps come before them."""

    def running(self, stage: Stage, *, updating: bool = False) -> AbstractContextManager[None]:
        """Run the micro-steps of a stage that replays routes, by its plan if it was announced."""

    def micro_step(self, number: int, routes: RoutingTrace) -> AbstractContextManager[None]:
        """Run one forward and its backward on rows that `routes` are replayed on."""

    def finish_gradients(self, max_norm: float) -> float:
        """Add up and clip the gradients of all ranks. Returns their norm before clipping."""

    def weights_changed(self) -> None:
        """Note that the optimizer has stepped: replicas of earlier weights are of no use."""

    def record(self) -> dict[str, Any]:
        """Give what is to be recorded about the step's execution; empty on all ranks but the first."""

    def close(self) -> None:
        """Give back the memory and threads that are held for it."""


class SingleProcess:
    """One process executes the whole policy: there is nothing to plan, and no rank to agree with."""

    def __init__(self, policy: RoutedTransformer) -> None:
        self.ranks = Ranks()
        self._model = policy.model

    def state_dict(self) -> Mapping[str, Tensor]:
        return self._model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load(self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(weights)
        load_state(optimizer, state)

    def plan(self, first: int, routes: RoutingTrace, stages: Sequence[Stage]) -> None:
        pass

    def running(self, stage: Stage, *, updating: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def micro_step(self, number: int, routes: RoutingTrace) -> AbstractContextManager[None]:
        return nullcontext()

    def finish_gradients(self, max_norm: float) -> float:
        return torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm).item()

    def weights_changed(self) -> None:
        pass

    def record(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass
