"""A model whose experts are spread over ranks: the plan in force, and its weights and gradients as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from foreroute.ep.agreement import share_plan
from foreroute.ep.compute import row_multiple
from foreroute.ep.execution import ExecutingHooks, InForce, PlanExecution
from foreroute.ep.execution_ranks import ExecutionRanks, MicroBatch
from foreroute.ep.layer import ExpertLayer
from foreroute.ep.shards import IN_FRONT, ExpertAxis, clip_gradients, cut_alike, shard_dense, sum_gradients
from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.home_moves import move_homes
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import AttachError, ReplayError
from foreroute.plan import StepPlan

BLOCK = re.compile(r".*?\.\d+\.")
"""The beginning of the names of what is in one block of a list of them."""


class ExpertParallelModel:
    """An expert-parallel model. Made by `foreroute.adapters.hf.distribute`.

    Every rank runs the model on rows of its own. Ranks share the loss: each backpropagates its part, and the parts add
    up to the loss, such as the sum over its own tokens divided by the number of tokens of all ranks. Gradients of
    experts then arrive complete at their home; `sum_gradients` adds up the others. Optimizers are ordinary ones, on
    `model.parameters()`.

    Outside of `RoutedTransformer.execute`, every expert is served at its home, and counts are exchanged in every layer.
    All ranks run the same forwards.

    Attributes:
        model: the model, with this rank's home experts as parameters.
        layers: its routed layers.
        group: the ranks.
        consensus: of them.
        ranks: the same, as they execute plans.
        in_force: the plan that is executed now, if one is.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        consensus: RankConsensus,
        peers: PeerGroup,
    ) -> None:
        self.model = model
        self.layers: list[ExpertLayer] = []
        self.group = group
        self.consensus = consensus
        self.ranks = ExecutionRanks(group, consensus, TransferOptions(paths="direct"), "hf", peers=peers)
        self._peers = peers
        self._dense_adds_up = False
        self.in_force = InForce()
        self._step = 0

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the rank that every expert lives on."""
        return np.stack([layer.home_E for layer in self.layers])

    @property
    def homes(self) -> dict[int, dict[str, Tensor]]:
        """By routed layer, name -> [E / G, ...], this rank's experts and their adapters."""
        return {layer.number: layer.home for layer in self.layers}

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those that differ from rank to rank: this rank's experts and their adapters."""
        return [parameter for layer in self.layers for parameter in layer.parameters.values()]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Those that every rank holds alike."""
        experts = set(map(id, self.expert_parameters()))
        return [parameter for parameter in self.model.parameters() if id(parameter) not in experts]

    def shard_dense(self) -> None:
        """Keep a part of every dense parameter on each rank, as FSDP2 has it, which gathers them layer by layer.

        A collective call, before an optimizer is made; dense parameters are `DTensor`s from then on. Their gradients
        are added up, and cut in the same way, within the backward.
        """
        shard_dense(self.model, self.expert_parameters(), [layer.path for layer in self.layers], self.group)
        self._dense_adds_up = True

    def _require_sums(self) -> None:
        """Raise `AttachError` where FSDP2 has taken over experts, or averages the gradients of dense parameters.

        Gradients of experts are sums over ranks, and those of the other parameters have to be, too.
        """
        for layer in self.layers:
            if any(isinstance(parameter, DTensor) for parameter in layer.parameters.values()):
                raise AttachError(
                    f"fully_shard has taken over the experts of {layer.path}, which hf.distribute spread over the "
                    "ranks; leave it to placed.shard_dense() to shard the others"
                )
        sharded = [path or "the model" for path, each in self.model.named_modules() if isinstance(each, FSDPModule)]
        if sharded and not self._dense_adds_up:
            raise AttachError(
                f"dense parameters are sharded by fully_shard, those of {sharded[0]} first, which averages "
                "their gradients over ranks, while those of experts are added up; call placed.shard_dense() "
                "in its place, after hf.distribute and before the optimizer is made"
            )

    def use(self, transfers: TransferOptions) -> None:
        """Have weights of replicas travel so from the next execution on; by default from peer to peer, a cell ahead.

        Args:
            transfers: the same on every rank. With `paths="host"`, the topology of a plan says how many ranks share a
                node's memory.
        """
        self.close()
        self.ranks.options = transfers

    def close(self) -> None:
        """Give back what weights travel by, such as memory that ranks share. The next execution makes it anew.

        Never raises: errors end here too.
        """
        self.ranks.close()

    def share_plan(self, make: Callable[[], StepPlan]) -> StepPlan:
        """Give all ranks the plan that the first one makes, so that it is made once. A collective call.

        Args:
            make: called on the first rank alone; it may wait for a thread that plans.

        Raises:
            PlanError: on the other ranks, when the first cannot make it; there, its own error.
            TransferError: when a rank does not answer, such as one that died while it planned.
        """
        return share_plan(self.consensus, make)

    @contextmanager
    def execute(
        self,
        hooks: ExecutingHooks,
        plan: StepPlan,
        counts_MLGE: NDArray[np.integer],
        micro_batches: Sequence[MicroBatch],
        step: int | None,
    ) -> Iterator[PlanExecution]:
        """What `RoutedTransformer.execute` says, of the model that these hooks are on."""
        if hooks.execution is not None:
            raise ReplayError("a plan is executed on this model; leave that execution before another one begins")
        self._require_sums()
        self._step = self._step + 1 if step is None else step
        execution = PlanExecution(
            self.ranks,
            self._step,
            plan,
            counts_MLGE,
            micro_batches,
            self.home_LE,
            self.homes,
            [range(len(self.layers))],
            row_multiples={layer.number: row_multiple(layer.parameters) for layer in self.layers},
            keeps_weights=step is not None,
        )
        self.in_force.hooks = hooks
        with execution.in_force(hooks):
            yield execution

    def sum_gradients(self) -> None:
        """Add up the gradients of dense parameters over all ranks. A collective call, before the optimizer's.

        Those of sharded ones are added up in the backward.

        Raises:
            AttachError: when FSDP2 has taken over experts, or averages the gradients of dense parameters.
            TransferError: when a rank does not answer.
        """
        self._require_sums()
        sum_gradients(self.dense_parameters(), self.group, self.consensus.group)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model, all experts included, is at most `max_norm`.

        A collective call, after `sum_gradients`. Returns the norm before, the same on all ranks.
        """
        return clip_gradients(self.dense_parameters(), self.expert_parameters(), max_norm, self.group)

    def move_homes(self, home_LE: NDArray[np.integer], optimizer: torch.optim.Optimizer | None = None) -> int:
        """Move experts to other homes, with their optimizer state. A collective call, between two steps.

        Args:
            home_LE: integers [L, E], such as those of the next plan; E / G experts of each layer on each rank.
            optimizer: of the model, after `zero_grad`.

        Returns:
            The bytes that this rank received.

        Raises:
            PlanError: on every rank alike, when homes are not as above, or ranks are given other homes.
            TransferError: when gradients are still there, ranks hold different state, or a rank does not answer.
        """
        homes: list[Mapping[str, Tensor]] = [dict(layer.parameters) for layer in self.layers]
        received = move_homes(self._peers, self.consensus, self.home_LE, home_LE, homes, optimizer, self._by_expert)
        for layer, home_E in zip(self.layers, np.array(home_LE, np.int16), strict=True):
            layer.home_E = home_E
        self.ranks.forget_weights()
        return received

    def state_dict(self) -> dict[str, Tensor]:
        """The weights of the whole model, experts in logical order, on every rank. A collective call.

        For a model that one rank can hold. `model.state_dict()` is the sharded one.
        """
        return {name: tensor for state in self.state_dicts() for name, tensor in state.items()}

    def state_dicts(self) -> Iterator[dict[str, Tensor]]:
        """The same in parts, a block of the model at a time: one block is whole at once. A collective call."""
        blocks: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._own_state().items():
            block = BLOCK.match(name)
            blocks.setdefault(block[0] if block else "", {})[name] = tensor
        for block_state in blocks.values():
            yield {name: self.whole(tensor, tensor) for name, tensor in block_state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up the weights of the whole model, as `state_dict` or the model before it was distributed gives them.

        Raises:
            PlacementError: when experts are not all there, as in the state of one rank.
            RuntimeError: when names or shapes are not the model's, as in `torch.nn.Module.load_state_dict`.
        """
        own = self._own_state()
        dense = {
            name: cut_alike(state[name], it) for name, it in own.items() if name in state and isinstance(it, DTensor)
        }
        self.model.load_state_dict({**state, **dense})

    def checkpoint_state(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """What `torch.distributed.checkpoint` saves of this rank, and loads in place. A collective call.

        No rank holds more than its share. What is loaded may have been saved on any number of ranks with any homes.

        Args:
            optimizer: of the model. One without state makes its first step, on zero gradients and at a learning rate of
                0, so that there is state to load into.

        Returns:
            "model" with every parameter and buffer by its name, and "optimizer" with its state by the same names;
            experts in logical order. Learning rates and such are the caller's.
        """
        state: dict[str, Any] = {"model": self.model.state_dict()}
        if optimizer is not None:
            parameters = dict(self.model.named_parameters())
            found: Any = get_optimizer_state_dict(self.model, optimizer)["state"]
            state["optimizer"] = {
                name: {key: self._logical(parameters[name], value) for key, value in values.items()}
                for name, values in found.items()
            }
        return state

    def _logical(self, parameter: Tensor, value: Any) -> Any:
        spread = self._spread(parameter)
        return value if spread is None or value.shape != parameter.shape else spread[0].logical(value, spread[1])

    def _spread(self, parameter: Tensor) -> tuple[ExpertLayer, ExpertAxis] | None:
        """The layer that a parameter of experts belongs to, and where it has them; None for dense ones."""
        found = ((layer, layer.axis_of(parameter)) for layer in self.layers)
        return next(((layer, axis) for layer, axis in found if axis is not None), None)

    def _by_expert(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """[E / G, ...], a parameter of experts or its optimizer state; no rows where it cannot be told."""
        spread = self._spread(parameter)
        if spread is None or spread[1] == IN_FRONT:
            return tensor
        return spread[1].first(tensor) if tensor.shape == parameter.shape else tensor[:0]

    def _own_state(self) -> dict[str, Tensor]:
        """Every tensor as this rank holds it."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: parameters.get(name, tensor) for name, tensor in self.model.state_dict(keep_vars=True).items()}

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """A tensor that is spread as a parameter is, its optimizer state for one, whole. A collective call."""
        if spread := self._spread(parameter):
            return spread[0].gather(tensor, spread[1])
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()

    def own(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """What this rank has of a whole tensor, if it is spread as a parameter is."""
        if spread := self._spread(parameter):
            return spread[0].own(tensor, spread[1])
        return cut_alike(tensor, parameter) if isinstance(parameter, DTensor) else tensor
