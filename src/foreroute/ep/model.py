"""A model whose experts are spread over ranks: the plan in force, and its weights and gradients as a whole."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from foreroute.ep.agreement import agree_on_rows, agree_on_step, objection_to_number, raise_alike, share_plan
from foreroute.ep.compute import row_multiple
from foreroute.ep.execution import ActivePlan, BatchRows, Execution, ExecutionStack
from foreroute.ep.layer import ExpertLayer
from foreroute.ep.shards import clip_gradients, cut_alike, shard_dense, sum_gradients
from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions, TransferRecord
from foreroute.ep.transfer.home_moves import move_homes
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import CountsError, InputError, PlanError, ReplayError, shown
from foreroute.plan import ExecutionSchedule, StepPlan
from foreroute.trace import RoutingTrace

BLOCK = re.compile(r".*?\.\d+\.")
"""The beginning of the names of what is in one block of a list of them."""


class ExpertParallelModel:
    """An expert-parallel model. Made by `foreroute.adapters.hf.distribute`.

    Every rank runs the model on rows of its own. Ranks share the loss: each backpropagates its part, and the parts add
    up to the loss, such as the sum over its own tokens divided by the number of tokens of all ranks. Gradients of
    experts then arrive complete at their home; `sum_gradients` adds up the others. Optimizers are ordinary ones, on
    `model.parameters()`.

    Outside of `executing`, routing is live and every expert is served at its home. All ranks run the same forwards.

    Attributes:
        model: the model, with this rank's home experts as parameters.
        layers: its routed layers.
        group: the ranks.
        consensus: of them.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[ExpertLayer],
        executions: ExecutionStack,
        group: dist.ProcessGroup,
        consensus: RankConsensus,
        peers: PeerGroup,
    ) -> None:
        self.model = model
        self.layers = layers
        self.group = group
        self.consensus = consensus
        self._executions = executions
        self._peers = peers
        self._transfers = TransferOptions(paths="direct", timeout_s=peers.timeout_s)
        self._engine: TransferEngine | None = None
        self._active: ActivePlan | None = None
        # what routers did, still to be looked at
        self._unseen: list[Execution] = []
        self._next_micro_step = 0

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the rank that every expert lives on."""
        return np.stack([layer.home_E for layer in self.layers])

    @property
    def homes(self) -> dict[int, dict[str, nn.Parameter]]:
        """By routed layer, name -> [E / G, ...], this rank's experts."""
        return {layer.number: layer.parameters for layer in self.layers}

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those that differ from rank to rank: this rank's experts."""
        return [parameter for home in self.homes.values() for parameter in home.values()]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Those that every rank holds alike."""
        experts = set(map(id, self.expert_parameters()))
        return [parameter for parameter in self.model.parameters() if id(parameter) not in experts]

    def shard_dense(self) -> None:
        """Keep a part of every dense parameter on each rank, as FSDP2 has it, which gathers them layer by layer.

        A collective call, before an optimizer is made; dense parameters are `DTensor`s from then on. Their gradients
        are added up, and cut likewise, within the backward.
        """
        shard_dense(self.model, self.expert_parameters(), [layer.path for layer in self.layers], self.group)

    def use(self, transfers: TransferOptions) -> None:
        """Have weights of replicas travel so from the next `begin_step` on; by default from peer to peer, a cell ahead.

        Args:
            transfers: the same on every rank. With `paths="host"`, the topology of a plan says how many ranks share a
                node's memory.
        """
        self.close()
        self._transfers = transfers

    def take_transfers(self) -> list[TransferRecord]:
        """What moved for replicas of this rank since the last call, and since the step began, in order."""
        return [] if self._engine is None else self._engine.take_records()

    def close(self) -> None:
        """Give back what weights travel by, such as memory that ranks share. The next `begin_step` makes it anew.

        Never raises: errors end here too.
        """
        if self._engine is not None:
            self._engine.close()
        self._engine = self._active = None

    def gather_counts(self, counts_MLE: ArrayLike) -> NDArray[np.int64]:
        """Gather the counts of all ranks, as `plan` and `begin_step` take them. A collective call.

        Args:
            counts_MLE: integers [M, L, E], the assignments of this rank's rows in each micro-step, such as a list of
                `BatchRows.routed_LE`. A rank without rows in a micro-step has zeros there.

        Returns:
            counts_MLGE: int64 [M, L, G, E], the same on every rank.

        Raises:
            CountsError: on every rank alike, when counts are not integers of the model's layers and experts, or ranks
                have different numbers of micro-steps.
            TransferError: when a rank does not answer.
        """
        mine, what = np.asarray(counts_MLE), "gathering counts"
        seen = self.consensus.texts(f"{mine.dtype} {list(mine.shape)}", what)
        num_layers, num_experts = self.home_LE.shape
        if len(set(seen)) > 1 or mine.shape[1:] != (num_layers, num_experts) or mine.dtype.kind not in "iu":
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(seen))
            raise CountsError(
                f"ranks have other counts than can be planned ({listed}); expected integers [micro-steps, "
                f"{num_layers}, {num_experts}] on every rank, with the same number of micro-steps"
            )
        counts_GMLE = self.consensus.gather(torch.from_numpy(mine.astype(np.int64)), what).numpy()
        return np.ascontiguousarray(np.moveaxis(counts_GMLE, 0, 2))

    def share_plan(self, make: Callable[[], StepPlan]) -> StepPlan:
        """Give all ranks the plan that the first one makes, so that it is made once. A collective call.

        Args:
            make: called on the first rank alone; it may wait for a thread that plans.

        Raises:
            PlanError: on the other ranks, when the first cannot make it; there, its own error.
            TransferError: when a rank does not answer, such as one that died while it planned.
        """
        return share_plan(self.consensus, make)

    def begin_step(
        self,
        step: int,
        plan: StepPlan,
        planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace],
        micro_batches: Sequence[BatchRows] | None = None,
        *,
        updating: bool = True,
    ) -> None:
        """Put a plan in force. A collective call, and the last one on the host before `sum_gradients`.

        Args:
            step: its number; another one after every change of weights.
            plan: the same on all ranks, with the homes that experts have.
            planned: integers [M, L, G, E], the counts that were planned; or the traces of all sequences of the step,
                which are counted by the packing of the plan.
            micro_batches: the rows of this rank in each micro-step. By default all rows are planned, and routing is not
                known ahead, so that counts are exchanged in every cell.
            updating: whether backward passes follow.

        Raises:
            PlanError: on every rank alike, when plans differ, or one is for other ranks, layers, experts, homes or
                tokens.
            CountsError: on every rank alike, when the plan was made for other counts, or the rows of one rank are not
                those planned.
            ReplayError: on every rank alike, when routers did otherwise than was known ahead, as in `sum_gradients`.
            TransferError: when a rank does not answer.
        """
        self._active = None
        self._require_routed(f"beginning step {step}")
        counts_MLGE = self._read(step, plan, planned)
        agree_on_step(self.consensus, step, plan, counts_MLGE, self.home_LE)
        rows_M = [BatchRows()] * plan.shape[0] if micro_batches is None else micro_batches
        exchanges_M = agree_on_rows(self.consensus, plan, counts_MLGE, rows_M)
        if micro_batches is not None and any(exchanges_M):
            warnings.warn(
                f"in {sum(exchanges_M)} of {len(exchanges_M)} micro-steps some rank sends rows that the plan has not "
                "counted, such as last tokens, or does not know its routes ahead: all ranks exchange counts in every "
                "cell, and wait for them; leave such rows out of the batch",
                stacklevel=2,
            )
        schedule = ExecutionSchedule(
            plan,
            counts_MLGE,
            self.consensus.rank,
            row_multiple_L=[row_multiple(layer.parameters) for layer in self.layers],
            paths=self._transfers.paths,
        )
        if self._engine is None:
            self._engine = TransferEngine(self.homes, self._transfers, self._peers)
        self._engine.begin_step(step, plan, schedule, updating=updating)
        self._active = ActivePlan(step, plan, counts_MLGE, self._engine, schedule, list(rows_M), exchanges_M)
        self._next_micro_step = 0

    def _read(
        self, step: int, plan: StepPlan, planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace]
    ) -> NDArray[np.integer]:
        """The counts of the plan, on all ranks or on none."""
        refusal: InputError | None = None
        try:
            if not isinstance(plan, StepPlan):
                raise PlanError(f"the plan is {shown(plan)}; expected what plan() or load_plan() gives")
            if isinstance(planned, np.ndarray):
                counts = planned
            else:
                traces = [planned] if isinstance(planned, RoutingTrace) else planned
                if not (isinstance(traces, Sequence) and all(isinstance(trace, RoutingTrace) for trace in traces)):
                    raise PlanError(f"what was planned is given as {shown(planned)}; expected counts or traces")
                counts = plan.counts_of(traces)
        except InputError as error:
            refusal = error
        objection = None if refusal is None else str(refusal)
        if objections := self.consensus.objections(objection, f"reading the plan of step {step}"):
            raise PlanError("; ".join(objections)) from refusal
        return counts

    @contextmanager
    def executing(self, micro_step: int) -> Iterator[Execution]:
        """Run one forward of the model as the plan in force says. The host asks no other rank.

        Where routes are known ahead, what routers did is compared with them later, so that the host need not wait for
        the device: by the next call of `begin_step` or of `sum_gradients`, before any weight changes.
        With activation checkpointing, `backward()` may run inside or outside the context, and those of
        several micro-steps in any order that is the same on all ranks.

        Args:
            micro_step: of the plan; they run once each, in their order, so that all ranks run the same.

        Yields:
            The execution.

        Raises:
            PlanError: without a plan in force, or when another of its micro-steps comes next. Where other ranks go on,
                they end with this one, at the latest within the timeout of their group.
            CountsError: in a forward, when counts are exchanged and are not those of the plan; on every rank alike.
            ReplayError: on leaving, when a layer of the model did not run.
        """
        active, expected = self._active, self._next_micro_step
        if active is None:
            raise PlanError("no plan is in force: call begin_step(step, plan, ...) first")
        if micro_step != expected or micro_step == active.plan.shape[0]:
            raise PlanError(
                f"micro-step {micro_step} begins after {expected} of {active.plan.shape[0]} of the plan have run; run "
                "each once, in their order, and call begin_step(...) to begin anew"
            )
        self._next_micro_step += 1
        execution = Execution(self.group, len(self.layers), active, micro_step)
        with self._executions.on_top(execution):
            yield execution
        execution.end()
        self._unseen.append(execution)

    def _require_routed(self, what: str, unrun: str | None = None) -> None:
        """Raise `ReplayError` on every rank alike, when routers of one did otherwise than was known ahead; once."""
        unseen, self._unseen = self._unseen, []
        misrouted = next(filter(None, (each.misrouted() for each in unseen)), None)
        raise_alike(self.consensus, ReplayError, misrouted or unrun, what)

    def sum_gradients(self) -> None:
        """Add up the gradients of dense parameters over all ranks. A collective call, before the optimizer's.

        Those of sharded ones are added up in the backward.

        Raises:
            ReplayError: on every rank alike, when one has not run all micro-steps of the plan in force, or its routers
                did otherwise than was known ahead, in any forward since the last call.
        """
        unrun, what = None, "adding up gradients"
        if self._active is not None:
            unrun = objection_to_number(self._next_micro_step, self._active.plan.shape[0])
            what = f"ending step {self._active.step}"
        self._require_routed(what, unrun)
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
        homes: list[Mapping[str, Tensor]] = [dict(home) for home in self.homes.values()]
        received = move_homes(self._peers, self.consensus, self.home_LE, home_LE, homes, optimizer)
        for layer, home_E in zip(self.layers, np.array(home_LE, np.int16), strict=True):
            layer.home_E = home_E
        if self._engine is not None:
            self._engine.end_step()
        self._active = None
        return received

    def layer_of(self, parameter: Tensor) -> ExpertLayer | None:
        """The layer of whose experts a parameter is: what cuts and gathers tensors like it."""
        return next((layer for layer in self.layers for own in layer.parameters.values() if own is parameter), None)

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
        layer = self.layer_of(parameter)
        return value if layer is None or value.shape != parameter.shape else layer.logical(value)

    def _own_state(self) -> dict[str, Tensor]:
        """Every tensor as this rank holds it."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: parameters.get(name, tensor) for name, tensor in self.model.state_dict(keep_vars=True).items()}

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """A tensor that is spread as a parameter is, its optimizer state for one, whole. A collective call."""
        if layer := self.layer_of(parameter):
            return layer.gather(tensor)
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()

    def own(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """What this rank has of a whole tensor, if it is spread as a parameter is."""
        if layer := self.layer_of(parameter):
            return layer.own_rows(tensor)
        return cut_alike(tensor, parameter) if isinstance(parameter, DTensor) else tensor
