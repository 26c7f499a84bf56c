"""A model whose experts are spread over ranks: the plan in force, and its weights and gradients as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foreroute.ep.compute import least_rows
from foreroute.ep.execution import ActivePlan, BatchRows, Execution, ExecutionStack
from foreroute.ep.layer import ExpertLayer
from foreroute.ep.shards import ExpertShards, clip_gradients, cut_alike, shard_dense, sum_gradients
from foreroute.ep.transfer import ReplicaWeights
from foreroute.ep.transfer.consensus import RankConsensus, agree_on_plan
from foreroute.ep.transfer.home_moves import move_homes
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.replica_weights import DirectWeights, expert_bytes
from foreroute.errors import CountsError, InputError, PlacementError, PlanError, ReplayError
from foreroute.plan import ExecutionSchedule, StepPlan, load_plan
from foreroute.plan.counts import counts_digest
from foreroute.plan.plan_file import plan_from_bytes, plan_to_bytes
from foreroute.plan.schedule import PathChoice
from foreroute.trace import RoutingTrace


class StepWeights(ReplicaWeights, Protocol):
    """Replica weights that are told which plan is in force, as `TransferEngine` and `DirectWeights` are."""

    @property
    def paths(self) -> PathChoice:
        """Which path weights take."""
        ...

    def begin_step(
        self, step: int, plan: StepPlan, schedule: ExecutionSchedule, *, updating: bool, digest: str | None = None
    ) -> None:
        """A plan is in force from now on, with this digest on all ranks. A collective call."""
        ...


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
        consensus: of the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[ExpertLayer],
        executions: ExecutionStack,
        consensus: RankConsensus,
        peers: PeerGroup,
        capture: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.model = model
        self.layers = layers
        self.consensus = consensus
        self._executions = executions
        self._peers = peers
        self._weights: StepWeights = DirectWeights(peers)
        self._capture = capture
        self._active: ActivePlan | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self._executions.top.group

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the rank that every expert lives on."""
        return np.stack([layer.shards.home_E for layer in self.layers])

    @property
    def homes(self) -> list[dict[str, nn.Parameter]]:
        """Per routed layer, name -> [E / G, ...], this rank's experts: what a `TransferEngine` is made with."""
        return [layer.shards.parameters for layer in self.layers]

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those that differ from rank to rank: this rank's experts."""
        return [parameter for home in self.homes for parameter in home.values()]

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

    def use(self, weights: StepWeights) -> None:
        """Take replica weights from here, from the next `begin_step` on; by default they are sent when needed."""
        self._weights = weights
        self._active = None

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

    def share_plan(self, plan: StepPlan | None) -> StepPlan:
        """Give all ranks the plan that the first one made, so that it is made once. A collective call.

        Args:
            plan: of the first rank, or None when it could not make one; the others' is not looked at.

        Raises:
            PlanError: on every rank alike, when the first has none.
            TransferError: when a rank does not answer, such as one that died while it planned.
        """
        mine = plan_to_bytes(plan) if self.consensus.rank == 0 and plan is not None else None
        content = self.consensus.from_first(mine, "waiting for the plan of rank 0")
        if content is None:
            raise PlanError("rank 0 made no plan; look for the first error in its log")
        return plan if plan is not None and self.consensus.rank == 0 else plan_from_bytes(content)

    def begin_step(
        self,
        step: int,
        plan: StepPlan | str | os.PathLike[str],
        planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace] | None = None,
        *,
        updating: bool = True,
    ) -> StepPlan:
        """Put a plan in force. A collective call.

        Args:
            step: its number; another one after every change of weights.
            plan: the same on all ranks, with the homes that experts have; or the file that it was saved to.
            planned: integers [M, L, G, E], the counts that were planned; or the traces of all sequences of the step,
                which are counted by the packing of the plan. Without them, counts are exchanged in every cell.
            updating: whether backward passes follow.

        Returns:
            The plan. Its packing says which sequences a rank runs in which micro-step.

        Raises:
            PlanError: on every rank alike, when plans differ, a file cannot be read, or one is for other ranks, layers,
                experts, homes or tokens.
            CountsError: on every rank alike, when the plan was made for other counts.
            TransferError: when a rank does not answer.
        """
        self._active = None
        plan, counts_MLGE = self._read(step, plan, planned)
        digest = _agree_on_step(self.consensus, step, plan, counts_MLGE, self.home_LE)
        schedule = ExecutionSchedule(
            plan,
            counts_MLGE,
            self.consensus.rank,
            least_rows_L=[least_rows(layer.shards.tensors) for layer in self.layers],
            expert_bytes_L=[expert_bytes(home) for home in self.homes],
            paths=self._weights.paths,
        )
        self._weights.begin_step(step, plan, schedule, updating=updating, digest=digest)
        self._active = ActivePlan(step, plan, counts_MLGE, self._weights, schedule)
        return plan

    def _read(
        self,
        step: int,
        plan: StepPlan | str | os.PathLike[str],
        planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace] | None,
    ) -> tuple[StepPlan, NDArray[np.integer] | None]:
        """The plan and its counts, on all ranks or on none."""
        refusal: InputError | None = None
        try:
            found = plan if isinstance(plan, StepPlan) else load_plan(plan)
            counts = planned if planned is None or isinstance(planned, np.ndarray) else found.counts_of(planned)
        except InputError as error:
            refusal = error
        objection = None if refusal is None else str(refusal)
        if objections := self.consensus.objections(objection, f"reading the plan of step {step}"):
            raise PlanError("; ".join(objections)) from refusal
        return found, counts

    @contextmanager
    def executing(self, micro_step: int, rows: BatchRows | None = None) -> Iterator[Execution]:
        """Run one forward of the model as the plan in force says. A collective call, on entering and on leaving.

        With the model's own activation checkpointing, `backward()` may run inside or outside the context, and those of
        several micro-steps in any order that is the same on all ranks.

        Args:
            micro_step: of the plan.
            rows: of this rank's micro-batch. By default all are planned, and routing is not known ahead.

        Yields:
            The execution.

        Raises:
            PlanError: without a plan in force, or when it has no such micro-step.
            CountsError: on every rank alike, before anything is sent, when the rows of one are not those planned; in a
                forward, or on leaving, when what routers did differs.
            ReplayError: on every rank alike, when a layer of the model did not run.
        """
        if self._active is None:
            raise PlanError("no plan is in force: call begin_step(step, plan, ...) first")
        rows = BatchRows() if rows is None else rows
        exchanges = _agree_on_rows(self.consensus, self._active, micro_step, rows)
        execution = Execution(self.group, len(self.layers), rows, self._active, micro_step, exchanges)
        with self._capture(), self._executions.on_top(execution):
            yield execution
        if objections := self.consensus.objections(execution.unexecuted(), "ending a micro-step"):
            raise ReplayError("; ".join(objections))
        if not exchanges and (objections := self.consensus.objections(execution.misrouted(), "ending a micro-step")):
            raise CountsError("; ".join(objections))

    def sum_gradients(self) -> None:
        """Add up the gradients of dense parameters over all ranks. A collective call, before the optimizer's.

        Those of sharded ones are added up in the backward.
        """
        sum_gradients(self.dense_parameters(), self.group, self.consensus.group)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model, all experts included, is at most `max_norm`.

        A collective call, after `sum_gradients`. Returns the norm before, the same on all ranks.
        """
        return clip_gradients(self.dense_parameters(), self.expert_parameters(), max_norm, self.group)

    def move_homes(self, home_LE: NDArray[np.int16], optimizer: torch.optim.Optimizer | None = None) -> int:
        """Move experts to other homes, with their optimizer state. A collective call, between two steps.

        Args:
            home_LE: int16 [L, E], such as that of the next plan; E / G experts of each layer on each rank.
            optimizer: of the model, after `zero_grad`.

        Returns:
            The bytes that this rank received.

        Raises:
            PlanError: when a rank would hold more or fewer experts than before.
            TransferError: when gradients are still there, ranks hold different state, or a rank does not answer.
        """
        homes: list[Mapping[str, Tensor]] = [dict(home) for home in self.homes]
        received = move_homes(self._peers, self.consensus, self.home_LE, home_LE, homes, optimizer)
        for layer, home_E in zip(self.layers, home_LE, strict=True):
            layer.shards.home_E = home_E
        self._active = None
        return received

    def shards_of(self, parameter: Tensor) -> ExpertShards | None:
        """Where a parameter, or its optimizer state, is one of experts: what cuts and gathers tensors like it."""
        return next(
            (layer.shards for layer in self.layers for own in layer.shards.parameters.values() if own is parameter),
            None,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The weights of the whole model, experts in logical order, on every rank. A collective call."""
        return {name: self.whole(tensor, tensor) for name, tensor in self._own_state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up the weights of the whole model, as `state_dict` or the model before it was distributed gives them.

        Raises:
            PlacementError: when experts are not all there, as in the state of one rank.
            RuntimeError: when names or shapes are not the model's, as in `torch.nn.Module.load_state_dict`.
        """
        own = self._own_state()
        local = {}
        for name, tensor in state.items():
            shards = self.shards_of(own[name]) if name in own else None
            if shards is not None and len(tensor) != len(shards.home_E):
                raise PlacementError(
                    f"{name} has {len(tensor)} experts, expected all {len(shards.home_E)} in order of their ids; load "
                    "what ExpertParallelModel.state_dict() or the model before it was distributed gives"
                )
            local[name] = self.own(own[name], tensor) if name in own else tensor
        with _states_allowed(self.layers):
            self.model.load_state_dict(local)

    def _own_state(self) -> dict[str, Tensor]:
        with _states_allowed(self.layers):
            return self.model.state_dict(keep_vars=True)

    def whole(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """A tensor that is spread as a parameter is, its optimizer state for one, whole. A collective call."""
        shards = self.shards_of(parameter)
        if shards is not None:
            return shards.gather(tensor)
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()

    def own(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """What this rank has of a whole tensor, if it is spread as a parameter is."""
        shards = self.shards_of(parameter)
        if shards is not None:
            return shards.local(tensor)
        return cut_alike(tensor, parameter) if isinstance(parameter, DTensor) else tensor


@contextmanager
def _states_allowed(layers: list[ExpertLayer]) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.shards.state_allowed())
        yield


def _agree_on_step(
    consensus: RankConsensus,
    step: int,
    plan: StepPlan,
    counts_MLGE: NDArray[np.integer] | None,
    home_LE: NDArray[np.int16],
) -> str:
    """Make sure that all ranks have the same plan, that it fits the model, and that the counts are its own.

    Args:
        consensus: of the ranks.
        step: its number.
        plan: that this rank is to put in force.
        counts_MLGE: integers [M, L, G, E], what was planned, or None.
        home_LE: int16 [L, E], where experts live.

    Returns:
        `plan_digest` of the plan.

    Raises:
        PlanError: on every rank alike, for different plans, or one for other ranks, layers, experts or homes.
        CountsError: on every rank alike, for counts that are not those of the plan.
        TransferError: when a rank does not answer.
    """
    digest = agree_on_plan(consensus, step, plan)
    what = f"agreeing on the homes and counts of step {step}"
    if objections := consensus.objections(_objection_to_plan(plan, home_LE), what):
        raise PlanError("; ".join(objections))
    if objections := consensus.objections(_objection_to_counts(plan, counts_MLGE), what):
        raise CountsError("; ".join(objections))
    return digest


def _agree_on_rows(consensus: RankConsensus, active: ActivePlan, micro_step: int, rows: BatchRows) -> bool:
    """Make sure that all ranks begin the same micro-step, with the rows that were planned.

    Returns:
        Whether counts must be exchanged in every cell: they must where one rank does not know its routes ahead, sends a
        row that is not planned, or has no counts.

    Raises:
        PlanError: on every rank alike, for different micro-steps, or one that the plan does not have.
        CountsError: on every rank alike, when the rows of one are not those planned.
        TransferError: when a rank does not answer.
    """
    num_micro_steps = active.plan.shape[0]
    objection = None
    if 0 <= micro_step < num_micro_steps:
        objection = _objection_to_rows(active, micro_step, rows, consensus.rank)
    is_known = active.counts_MLGE is not None and rows.routed_LE is not None and rows.all_planned
    seen = torch.tensor([micro_step, -micro_step, objection is not None, not is_known])
    what = f"beginning micro-step {micro_step} of step {active.step}"
    most, minus_least, objected, exchanges = consensus.most(seen, what).tolist()
    if most != -minus_least or not 0 <= micro_step < num_micro_steps:
        raise PlanError(
            f"ranks begin micro-steps {-minus_least} to {most} of a plan that has {num_micro_steps}; expected the same "
            f"on all of them, from 0 to {num_micro_steps - 1}"
        )
    if objected:
        texts = consensus.texts(objection or "", what)
        raise CountsError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))
    return bool(exchanges)


def _objection_to_plan(plan: StepPlan, home_LE: NDArray[np.int16]) -> str | None:
    if plan.shape[1:] != home_LE.shape:
        return (
            f"the plan is for {plan.shape[1]} routed layers of {plan.shape[2]} experts, the model has "
            f"{home_LE.shape[0]} of {home_LE.shape[1]}"
        )
    if (plan.home_LE != home_LE).any():
        layer, expert = np.argwhere(plan.home_LE != home_LE)[0].tolist()
        return (
            f"routed layer {layer}: expert {expert} lives on rank {home_LE[layer, expert]}, and on rank "
            f"{plan.home_LE[layer, expert]} by the plan; move homes first"
        )
    return None


def _objection_to_counts(plan: StepPlan, counts_MLGE: NDArray[np.integer] | None) -> str | None:
    if counts_MLGE is None:
        return None
    expected = (*plan.shape[:2], plan.topology.num_ranks, plan.shape[2])
    if counts_MLGE.shape != expected:
        return f"counts are {list(counts_MLGE.shape)}, the plan is for {list(expected)}"
    found = counts_digest(counts_MLGE)
    if found != plan.counts_digest:
        return f"counts have digest {found}, the plan was made for {plan.counts_digest}; hand in the counts of the plan"
    return None


def _objection_to_rows(active: ActivePlan, micro_step: int, rows: BatchRows, rank: int) -> str | None:
    if active.counts_MLGE is None or rows.routed_LE is None:
        return None
    planned_LE = active.counts_MLGE[micro_step, :, rank]
    if rows.routed_LE.shape != planned_LE.shape:
        return f"rows are routed to {list(rows.routed_LE.shape)} layers and experts, expected {list(planned_LE.shape)}"
    if (rows.routed_LE != planned_LE).any():
        layer, expert = np.argwhere(rows.routed_LE != planned_LE)[0].tolist()
        return (
            f"its rows of micro-step {micro_step} make {rows.routed_LE[layer, expert]} assignments to expert {expert} "
            f"of routed layer {layer}, {planned_LE[layer, expert]} were planned; execute the micro-batches of the plan"
        )
    return None
