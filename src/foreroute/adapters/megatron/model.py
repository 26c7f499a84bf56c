"""A Megatron-Core model whose routing can be recorded and replayed: how its ranks share routes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import megatron.core
import numpy as np
from numpy.typing import NDArray
from torch import nn

from foreroute.adapters.megatron.discover import Chunk
from foreroute.adapters.megatron.expert_placement import HomePlacement
from foreroute.adapters.megatron.forward_args import Call, find_layout, in_batch_order, require_fits
from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.adapters.megatron.plan_execution import ExecutionRanks, PlanExecution, whole_counts
from foreroute.adapters.megatron.recording import RankGroups, rows_over_ranks
from foreroute.adapters.megatron.route_shard import RouteShard, Share, shard
from foreroute.adapters.megatron.schedule import ReplayingStep, RoutesIn, StepListener, routes_in
from foreroute.core.passes import LateChecks
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, LayoutError, ReplayError, TraceContentError
from foreroute.layout import Layout
from foreroute.plan import StepPlan
from foreroute.replay import (
    Counts,
    ForwardRows,
    MissingRows,
    PaddingRows,
    PassRoutes,
    Policy,
    RecordedPass,
    ReplaySession,
    RoutedModel,
    Telemetry,
    not_of_kind,
    require_choices,
    require_version,
)
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace


class RoutedMegatron(RoutedModel):
    """Recording and replaying sessions for one Megatron-Core model, on one rank. Made by `attach`.

    Attributes:
        chunks: what this rank runs: the model, its pipeline stage, or the virtual chunks of that.
        share: which of the rows this rank's routers see.
        layers: the routed layers of this rank, chunk after chunk.
    """

    padding: PaddingRows = "spread"

    def __init__(self, chunks: tuple[Chunk, ...], spec: RoutingSpec, share: Share, num_places: int) -> None:
        self._chunk_layers = [tuple(site.layer for site in chunk.sites) for chunk in chunks]
        hooks = [
            ChunkHooks(chunk, number, _part(spec, self._chunk_layers[number]), share)
            for number, chunk in enumerate(chunks)
        ]
        super().__init__(
            spec,
            hooks,
            [each.spec for each in hooks],
            {"engine": "megatron-core", "engine_version": megatron.core.__version__},
        )
        self.chunks = chunks
        self.share = share
        sites = [site for chunk in chunks for site in chunk.sites]
        self.layers = tuple(site.layer for site in sites)
        self._homes = HomePlacement(spec, sites, num_places, chunks[0].trunk.pg_collection)
        self._chunk_hooks = hooks
        self._ranks: ExecutionRanks | None = None
        self._execution: PlanExecution | None = None
        self._num_executions = 0
        self._chunk_of: dict[int, tuple[nn.Module, int]] = {}

    def shard(
        self,
        trace: RoutingTrace,
        layout: Layout,
        *,
        weight_version: int | Collection[int] | None = None,
        missing: MissingRows | Literal["spread"] = "error",
        padding: PaddingRows = "spread",
        gate_weights: bool = False,
    ) -> RouteShard:
        """Cut the routes of one micro-batch to this rank's rows and layers, to wait for it in little memory.

        Args:
            trace: routes of the micro-batch's sequences.
            layout: where they are in the batch, before ranks share it: `layout.pad(trace.lengths, side=...,
                order="sbhd")` for a padded [B, T] batch, `layout.pack(trace.lengths, ...)` for a packed one.
            weight_version: as in `replay`.
            missing: as in `replay`. "spread" is for rows that no token of the loss depends on: it picks for them as for
                padding, evenly over experts and their ranks, and leaves them out of statistics, so that a plan knows
                every row.
            padding: as in `replay`.
            gate_weights: as in `replay`.

        Raises:
            TraceError: when `trace` is none.
            SpecMismatchError: when the trace belongs to another model, or has choices of indexers.
            StaleTraceError: when it was recorded under another weight version.
            BatchMismatchError: when the layout is for other rows, or rows are missing.
            LayoutError: when ranks cannot share the layout.
            TraceContentError: when gate weights are asked for and the trace has none.
        """
        if not isinstance(trace, RoutingTrace):
            raise not_of_kind("what is to be sharded", trace, "a RoutingTrace")
        _require_layout(layout)
        self.spec.require_same(trace.spec, what="the trace")
        require_choices(trace, self.indexers)
        if weight_version is not None:
            require_version(trace.versions, weight_version, "the trace")
        policy = Policy("native" if missing == "spread" else missing, padding, "native", False, gate_weights)
        return self._cut(trace, layout, policy, missing)

    def replaying(
        self,
        forward_step: Callable[..., Any],
        *,
        routes_of: RoutesIn = routes_in,
        missing: MissingRows = "error",
        padding: PaddingRows = "spread",
        counts: Counts = "native",
        telemetry: bool = False,
        gate_weights: bool = False,
    ) -> ReplayingStep:
        """Wrap a forward step for `get_forward_backward_func()`: each micro-batch is replayed on the routes it brings.

        The step takes one batch from its data iterator and calls the model, as ever. A batch with routes is replayed,
        forward and recomputation, and one without is routed natively. Every stage and virtual chunk must be given the
        batch, since each replays layers of its own.

        Args:
            forward_step: `forward_step(data_iterator, model, ...)`.
            routes_of: finds the routes in a batch, a trace or what `shard` made of one, or None; `batch["routes"]`
                or `batch.routes` by default.
            missing: as in `replay`, for traces. The mask of "drop" is `routed.session.loss_mask_BT`, inside the step.
            padding: as in `replay`, for traces.
            counts: as in `replay`.
            telemetry: as in `replay`; ask the wrapped step for its `agreement()`.
            gate_weights: as in `replay`.

        Returns:
            The step, to be called like the one that was given.
        """
        policy = Policy(missing, padding, counts, telemetry, gate_weights)
        for name, given in (("forward_step", forward_step), ("routes_of", routes_of)):
            if not callable(given):
                raise ConfigError(f"{name} is a {type(given).__name__}; expected a function")

        checks = LateChecks(of_step=True)

        def open_session(routes: Any, sums: dict[int, Telemetry]) -> ReplaySession:
            return ReplaySession(self.routes_of(routes, None, policy, checks), policy, self._chunk_specs, sums)

        return ReplayingStep(forward_step, routes_of, open_session, self._running, policy)

    def gather_counts(self, micro_batches: Sequence[RouteShard]) -> NDArray[np.int32]:
        """Count the routes of all ranks of this expert-parallel group, as `plan` and `execute` take them.

        A collective call on every rank of the model.

        Args:
            micro_batches: of this rank, in the order in which the schedule will take them, made by `shard`.

        Returns:
            counts_MLGE: int32 [M, L, G, E], the same on every rank of the group and its pipeline stages. Rows without a
                route are not counted; padding that is spread is.

        Raises:
            TraceError: on every rank of the group alike, when one hands in what `shard` did not make.
            CountsError: on every rank of the group alike, when ranks or stages have different numbers of micro-batches.
            TransferError: when a rank does not answer.
        """
        counts = self._execution_ranks().gather_counts(micro_batches)
        return whole_counts(counts, self.layers, self.spec, self.chunks[0].trunk.pg_collection.pp)

    @contextmanager
    def execute(
        self, plan: StepPlan, counts_MLGE: NDArray[np.integer], micro_batches: Sequence[RouteShard]
    ) -> Iterator[PlanExecution]:
        """Serve every MoE layer of every micro-batch by its cell of a plan while the context is open.

        Opened around one call of Megatron's schedule whose forward step is `replaying`, or around `replay` sessions of
        the same micro-batches, with backward inside. Weights may change between two executions and not within one. A
        collective call on every rank of the expert-parallel group and its pipeline stages on entering and on leaving;
        of the group in a stage whenever a forward begins.

        Args:
            plan: of these micro-batches, the same on every rank of the group and its pipeline stages. Experts live
                where it says.
            counts_MLGE: what it was made for, from `gather_counts`.
            micro_batches: the routes that the batches bring, in the order in which the schedule takes them.

        Yields:
            The execution.

        Raises:
            PlanError: on every rank alike, when plans differ, or one is for other ranks, layers, experts or homes.
            CountsError: on every rank alike, when the plan was made for other counts, or a micro-batch has others.
            PlacementError: on every rank alike, when a layer cannot execute a plan.
            TraceError: on every rank alike, when one hands in what `shard` did not make.
            ReplayError: on every rank alike, when a planned micro-batch was not run, or a plan is executed already.
            TransferError: when a rank does not answer.
        """
        self._require_no_execution("another one begins")
        self._num_executions += 1
        stage = [(chunk.sites, hooks.passes) for chunk, hooks in zip(self.chunks, self._chunk_hooks, strict=True)]
        ranks, step = self._execution_ranks(), self._num_executions
        execution = PlanExecution(ranks, step, plan, counts_MLGE, micro_batches, self.spec, stage, self.home_LE)
        with execution.in_force():
            self._execution = execution
            try:
                yield execution
            finally:
                self._execution = None

    def _execution_ranks(self) -> ExecutionRanks:
        if self._ranks is None:
            sites = [site for chunk in self.chunks for site in chunk.sites]
            groups = self.chunks[0].trunk.pg_collection
            self._ranks = ExecutionRanks(sites[0].block.ep_group if sites else groups.ep, groups.pp)
        return self._ranks

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the expert-parallel rank that every expert of the whole model lives on now."""
        return self._homes.home_LE

    @property
    def block_home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the homes that Megatron gives experts when it builds a model, and looks for in checkpoints."""
        return self._homes.block_home_LE

    def move_homes(self, homes: StepPlan | NDArray[np.integer], optimizer: Any) -> int:
        """Move experts to other expert-parallel ranks, with all that the optimizer keeps for them.

        A collective call on every rank of the job, between two steps, when gradients have been set to zero. Routers
        go on in logical experts, and so do traces, auxiliary losses, expert bias and counts. What arrives on a rank
        is held beside what is there until all ranks have everything; then it is written in place. The experts of a
        rank are in its slots in ascending order of their ids.

        Args:
            homes: a plan, of which homes alone are taken, or integers [L, E] for the routed layers of `spec`: the rank
                of the expert-parallel group that each expert lives on from now on, E / G on each. The same on every
                rank.
            optimizer: the one that trains the experts, of torch or of Megatron; None where none does.

        Returns:
            Bytes that this rank received from others.

        Raises:
            PlanError: on every rank alike, when homes differ between ranks, are of other layers, experts or ranks, or
                not E / G to a rank.
            TransferError: on every rank alike, when something cannot be moved, such as an expert with a gradient or
                state of an unknown kind, or a rank is gone. Nothing has moved then.
            ReplayError: while a plan is executed.
        """
        self._require_no_execution("experts move")
        return self._homes.move(homes, optimizer)

    def _require_no_execution(self, before: str) -> None:
        if self._execution is not None:
            raise ReplayError(f"a plan is executed on this model; leave that execution before {before}")

    def routes_of(
        self, routes: Any, layout: Layout | None, policy: Policy, checks: LateChecks | None = None
    ) -> MicroBatchRoutes:
        """Those of one micro-batch, cut to this rank when its forward begins. See `RoutedModel`."""
        checks = LateChecks() if checks is None else checks
        if layout is not None:
            _require_layout(layout)
        if isinstance(routes, RouteShard):
            _require_weights(policy, routes.weights_LRK)
            self._require_policies_of(routes, policy)
            self.spec.require_same(routes.spec, what="the routes")
            if layout is not None or routes.layers != self.layers:
                raise BatchMismatchError(
                    "the routes are cut to a rank already: give no layout with them, and only those of this rank"
                )
            return MicroBatchRoutes(
                routes, lambda call: routes, self._chunk_hooks, policy.counts, lambda: self._execution, checks
            )
        if not isinstance(routes, RoutingTrace):
            raise not_of_kind("what is to be replayed", routes, "a RoutingTrace, or what `shard` made of one")
        trace = routes
        _require_weights(policy, trace.gate_weights_NLK)
        self.spec.require_same(trace.spec, what="the trace")
        require_choices(trace, self.indexers)

        def cut(call: Call) -> RouteShard:
            return self._cut(trace, find_layout(trace, call) if layout is None else layout, policy, policy.missing)

        return MicroBatchRoutes(trace, cut, self._chunk_hooks, policy.counts, lambda: self._execution, checks)

    def _require_policies_of(self, routes: RouteShard, policy: Policy) -> None:
        """What was cut says what becomes of padding and of rows without a route; defaults give way to it."""
        for name, asked, default, cut in (
            ("missing", policy.missing, "error", routes.missing),
            ("padding", policy.padding, self.padding, routes.padding),
        ):
            if asked not in (default, cut):
                raise ConfigError(
                    f"{name} is {asked!r}, and the routes were cut with {name}={cut!r}; give it to routed.shard()"
                )

    def rows_of(self, passes: list[list[RecordedPass]]) -> list[ForwardRows]:
        """Over all ranks of the model. See `RoutedModel`."""
        trunk = self.chunks[0].trunk
        groups = RankGroups(
            trunk.tp_group if self.share.sp > 1 else None,
            trunk.cp_group if self.share.cp > 1 else None,
            trunk.pg_collection.pp,
        )
        return rows_over_ranks(passes, self.spec, self._chunk_layers, self.share, groups)

    def _cut(
        self, trace: RoutingTrace, layout: Layout, policy: Policy, missing: MissingRows | Literal["spread"]
    ) -> RouteShard:
        home_LE = self.home_LE[[self.spec.layers.index(layer) for layer in self.layers]]
        return shard(
            trace,
            layout,
            self.share,
            self.layers,
            home_LE,
            missing=missing,
            padding=policy.padding,
            gate_weights=policy.gate_weights,
            pin=next(self.chunks[0].trunk.parameters()).is_cuda,
        )

    @contextmanager
    def _running(self, model: nn.Module, listener: StepListener) -> Iterator[None]:
        """A forward step on one of the chunks, wrapped or not."""
        hooks = self._chunk_hooks[self._number_of(model)]
        with hooks.listening(listener), self.replaying_now(lambda: listener.session):
            yield

    def _number_of(self, model: nn.Module) -> int:
        """Which chunk a schedule runs, wrapped or not."""
        known = self._chunk_of.get(id(model))
        if known is None:
            inside = set(model.modules())
            numbers = [n for n, chunk in enumerate(self.chunks) if chunk.trunk in inside]
            if len(numbers) != 1:
                raise AttachError("the forward step was called with another model than the one that was attached")
            known = self._chunk_of[id(model)] = (model, numbers[0])
        return known[1]


class MicroBatchRoutes:
    """The routes of one micro-batch on one rank.

    Args:
        routes: what they are cut of, or are already.
        cut: gives those of this rank, when the first forward begins.
        hooks: of the chunks.
        counts: which selection is to be counted.
        execution: the one in force when a forward begins, or None.
        checks: of its tokens, where they are compared on a device.
    """

    def __init__(
        self,
        routes: RoutingTrace | RouteShard,
        cut: Callable[[Call], RouteShard],
        hooks: Sequence[ChunkHooks],
        counts: Counts,
        execution: Callable[[], PlanExecution | None],
        checks: LateChecks,
    ) -> None:
        self._routes = routes
        self._checks = checks
        self._execution = execution
        self._shard: RouteShard | None = None
        self._cut = cut
        self._hooks = hooks
        self._counts = counts

    @property
    def versions(self) -> tuple[int, ...]:
        """See `foreroute.replay.Routes`."""
        return self._routes.versions

    def of_pass(self, chunk: int, call: Call) -> PassRoutes:
        """Cut the routes, compare the tokens, and move the chunk's part to the device. See `Routes`."""
        if call.inference is not None:
            raise BatchMismatchError(
                "the forward runs with an inference context; replay whole sequences, without a key-value cache"
            )
        if self._shard is None:
            self._shard = self._cut(call)
        routes, hooks = self._shard, self._hooks[chunk]
        micro_step = None
        execution = self._execution()
        if execution is not None and hooks.spec is not None:
            micro_step = execution.begin_pass(chunk, routes)
        require_fits(call, routes, self._checks)
        loss_mask = partial(in_batch_order, routes, call.device, 1 if call.input_ids is None else len(call.input_ids))
        drops = routes.dropped_C is not None and bool(hooks.trunk.post_process)
        if hooks.spec is None:
            return PassRoutes(None, loss_mask, drops)
        rows = routes.rows(
            hooks.spec.layers,
            call.device,
            mask_padding=hooks.counts_all_ranks,
            counts=self._counts,
            micro_step=micro_step,
        )
        return PassRoutes(rows, loss_mask, drops)

    def close(self) -> None:
        """What a device was asked is looked at. See `Routes`."""
        self._checks.close()


def _part(spec: RoutingSpec, layers: tuple[RoutedLayer, ...]) -> RoutingSpec | None:
    return RoutingSpec(spec.num_experts, spec.top_k, layers, model=spec.model) if layers else None


def _require_weights(policy: Policy, weights: NDArray[np.float32] | None) -> None:
    if policy.gate_weights and weights is None:
        raise TraceContentError(
            "the routes have no gate weights to replay; record them with record(gate_weights=True), cut them with "
            "shard(gate_weights=True), or leave gate_weights out"
        )


def _require_layout(layout: object) -> None:
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"layout is a {type(layout).__name__}; expected one of foreroute.layout, of pad(...) or pack(...)"
        )
