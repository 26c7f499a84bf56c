"""A Megatron-Core model whose routing can be recorded and replayed: how its ranks share routes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import megatron.core
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.adapters.megatron.forward_args import Call, compare_tokens, find_layout, require_fits
from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.adapters.megatron.plan_execution.execution import PlannedExperts, planned_batches
from foreroute.adapters.megatron.recording import rows_over_ranks
from foreroute.adapters.megatron.route_shard import RouteShard, shard
from foreroute.adapters.megatron.schedule import ReplayingStep, routes_in
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.ep import PlanExecution
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, LayoutError
from foreroute.layout import Layout
from foreroute.plan import StepPlan
from foreroute.replay import ForwardRows, Policy, RecordedPass, ReplayRows, ReplaySession, RoutedModel, Telemetry
from foreroute.replay.arguments import not_of_kind, require_version
from foreroute.replay.indexers import require_choices
from foreroute.replay.rows import Counts, MissingRows, PaddingRows
from foreroute.trace import RoutingSpec, RoutingTrace


class RoutedMegatron(RoutedModel):
    """Recording and replaying sessions for one Megatron-Core model, on one rank. Made by `attach`.

    Attributes:
        chunks: what this rank runs: the model, its pipeline stage, or the virtual chunks of that.
        layers: the routed layers of this rank, chunk after chunk.
        share: which of the rows this rank's routers see.
        spread: its experts, on which plans are executed.
        execution: the plan that is executed now, or None.
    """

    padding: PaddingRows = "spread"
    chunks: Sequence[ChunkHooks]

    def __init__(self, chunks: Sequence[ChunkHooks], spec: RoutingSpec, ep_size: int) -> None:
        made_by = {"engine": "megatron-core", "engine_version": megatron.core.__version__}
        of_chunks = [
            RoutingSpec(spec.num_experts, spec.top_k, each.layers, model=spec.model) if each.layers else None
            for each in chunks
        ]
        super().__init__(spec, chunks, of_chunks, made_by)
        self.layers = tuple(layer for each in chunks for layer in each.layers)
        self.share = chunks[0].share
        self.spread = PlannedExperts(spec, chunks, ep_size)
        self.execution: PlanExecution | None = None
        self._hooks_of: dict[int, tuple[nn.Module, ChunkHooks]] = {}

    def shard(
        self,
        trace: RoutingTrace,
        layout: Layout,
        *,
        weight_version: int | Collection[int] | None = None,
        missing: MissingRows | Literal["spread"] = "error",
        padding: PaddingRows = "spread",
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

        Raises:
            LayoutError: when ranks cannot share the layout.
            BatchMismatchError: when the layout is for other rows, or rows are missing.
            ForerouteError: for the trace and its weight version, as `replay`.
        """
        self._require_trace(trace, "what is to be sharded", "a RoutingTrace")
        _require_layout(layout)
        if weight_version is not None:
            require_version(trace.versions, weight_version, "the trace")
        policy = Policy("native" if missing == "spread" else missing, padding, "native", telemetry=False)
        return self._cut(trace, layout, policy, missing)

    def replaying(
        self,
        forward_step: Callable[..., Any],
        *,
        routes_of: Callable[[Any], Any] = routes_in,
        missing: MissingRows = "error",
        padding: PaddingRows = "spread",
        counts: Counts = "native",
        telemetry: bool = False,
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

        Returns:
            The step, to be called like the one that was given.
        """
        policy = Policy(missing, padding, counts, telemetry)
        for name, given in (("forward_step", forward_step), ("routes_of", routes_of)):
            if not callable(given):
                raise ConfigError(f"{name} is a {type(given).__name__}; expected a function")
        sums = self._telemetry_of(policy)
        return ReplayingStep(self, forward_step, routes_of, policy, sums)

    def session_of(
        self, routes: RoutingTrace | RouteShard, policy: Policy, telemetry: Telemetry | None
    ) -> ReplaySession:
        """Make the session of one micro-batch of a wrapped forward step."""
        found = self.routes_of(routes, None, policy)
        return ReplaySession(found, policy, self.checks, telemetry)

    def gather_counts(self, micro_batches: Sequence[RouteShard]) -> NDArray[np.int32]:
        """Count the routes of all ranks: int32 [M, L, G, E]. See `foreroute.ep.ExpertParallelModel`."""
        return self.spread.gather_counts(partial(planned_batches, micro_batches))

    def execute(
        self,
        plan: StepPlan | None,
        planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace],
        micro_batches: Sequence[RouteShard],
        *,
        step: int | None = None,
    ) -> AbstractContextManager[PlanExecution]:
        """Execute a plan while the context is open. See `foreroute.ep.ExpertParallelModel`.

        Args:
            plan: of these micro-batches; None computes every expert at its home.
            planned: counts [M, L, G, E] of `gather_counts` that it was made for, or the traces of the whole step.
            micro_batches: what `shard` made of the routes that batches bring, in the order of the schedule.
            step: of the optimizer; executions of one number load weights once.
        """
        return self.spread.execute(self, plan, planned, partial(planned_batches, micro_batches), step)

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the expert-parallel rank that every expert of the whole model lives on now."""
        return self.spread.home_LE

    @property
    def block_home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the homes that Megatron gives experts when it builds a model, and looks for in checkpoints."""
        return self.spread.block_home_LE

    def share_plan(self, make: Callable[[], StepPlan]) -> StepPlan:
        """Give all ranks the plan that the first one makes. See `foreroute.ep.ExpertParallelModel`."""
        return self.spread.share_plan(make)

    def use(self, transfers: TransferOptions) -> None:
        """Say how weights of replicas travel. See `foreroute.ep.ExpertParallelModel`."""
        self.spread.use(transfers)

    def move_homes(self, homes: StepPlan | NDArray[np.integer], optimizer: Any = None) -> int:
        """Move experts to other ranks, and return the bytes received. See `foreroute.ep.ExpertParallelModel`."""
        return self.spread.move_homes(homes, optimizer)

    def close(self) -> None:
        """Release what weights of replicas travel by. See `foreroute.ep.ExpertParallelModel`."""
        self.spread.close()

    def routes_of(self, routes: Any, layout: Layout | None, policy: Policy) -> MicroBatchRoutes:
        """Those of one micro-batch, cut to this rank when its forward begins. See `RoutedModel`."""
        if layout is not None:
            _require_layout(layout)
        if isinstance(routes, RouteShard):
            self._require_policies_of(routes, policy)
            self.spec.require_same(routes.spec, what="the routes")
            if layout is not None or routes.layers != self.layers:
                raise BatchMismatchError(
                    "the routes are cut to a rank already: give no layout with them, and only those of this rank"
                )
        else:
            self._require_trace(routes, "what is to be replayed", "a RoutingTrace, or what `shard` made of one")
        return MicroBatchRoutes(self, routes, layout)

    def rows_of(self, passes: list[list[RecordedPass]]) -> list[ForwardRows]:
        """Over all ranks of the model. See `RoutedModel`."""
        return rows_over_ranks(
            passes, self.spec, [each.layers for each in self.chunks], self.share, self.chunks[0].trunk.pg_collection
        )

    def _require_trace(self, trace: object, what: str, expected: str) -> None:
        if not isinstance(trace, RoutingTrace):
            raise not_of_kind(what, trace, expected)
        self.spec.require_same(trace.spec, what="the trace")
        require_choices(trace, self.indexers)

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

    def _cut(
        self, trace: RoutingTrace, layout: Layout, policy: Policy, missing: MissingRows | Literal["spread"]
    ) -> RouteShard:
        home_LE = self.home_LE[[self.spec.layers.index(layer) for layer in self.layers]]
        return shard(trace, layout, self.share, self.layers, home_LE, missing=missing, padding=policy.padding)

    def hooks_of(self, model: nn.Module) -> ChunkHooks:
        """Find the hooks of the chunk that a schedule runs, wrapped or not."""
        known = self._hooks_of.get(id(model))
        if known is None:
            inside = set(model.modules())
            found = [hooks for hooks in self.chunks if hooks.trunk in inside]
            if len(found) != 1:
                raise AttachError("the forward step was called with another model than the one that was attached")
            known = self._hooks_of[id(model)] = (model, found[0])
        return known[1]


class MicroBatchRoutes:
    """The routes of one micro-batch on one rank.

    Args:
        routed: the model.
        routes: that are replayed, in what the model was given or cut to its rank already.
        layout: where they are in the batch, or None to see it from that.
    """

    def __init__(self, routed: RoutedMegatron, routes: RoutingTrace | RouteShard, layout: Layout | None) -> None:
        self.versions = routes.versions
        self._routed, self._routes, self._layout = routed, routes, layout
        self._shard = routes if isinstance(routes, RouteShard) else None

    def of_pass(self, chunk: int, call: Call, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        """Cut the routes, compare the tokens, and move the chunk's part to the device. See `Routes`."""
        if call.inference is not None:
            raise BatchMismatchError(
                "the forward runs with an inference context; replay whole sequences, without a key-value cache"
            )
        if self._shard is None:
            trace, layout = self._routes, self._layout
            assert isinstance(trace, RoutingTrace), "a shard is cut already"
            layout = find_layout(trace, call, checks) if layout is None else layout
            self._shard = self._routed._cut(trace, layout, policy, policy.missing)
        shard = self._shard
        hooks, execution = self._routed.chunks[chunk], self._routed.execution
        cells = execution.begin_pass(chunk, shard) if execution is not None and hooks.layers else None
        _require_tokens(call, shard, checks)
        rows = shard.rows(hooks.layers, call.device, mask_padding=hooks.counts_all_ranks, counts=policy.counts)
        return replace(
            rows,
            cells=cells,
            loss_mask=partial(_loss_mask, shard, call),
            drops=bool(hooks.trunk.post_process) and shard.dropped_C is not None,
        )


def _require_tokens(call: Call, shard: RouteShard, checks: DeferredChecks) -> None:
    """Compare the tokens of a call, if it has any, with those of routes. Other ones are told late on a device.

    Raises:
        BatchMismatchError: when there are more or fewer; on the CPU, where they are others.
    """
    tokens = call.input_ids
    if tokens is None:
        return
    if tokens.numel() != len(shard.tokens_C):
        raise BatchMismatchError(
            f"the model is given {tokens.numel()} slots on this rank and the layout has {len(shard.tokens_C)}; lay the "
            "routes out as the batch is padded or packed"
        )
    checks.add(torch.cat(compare_tokens(call, shard)).any(), partial(require_fits, call.kept(), shard))


def _loss_mask(shard: RouteShard, call: Call) -> Tensor:
    """Bool [B, T] on the device, the tokens that belong in the loss; B is 1 where the stage is given no tokens."""
    batch = 1 if call.input_ids is None else len(call.input_ids)
    counted_C = shard.on_device(call.device).upload("counted tokens", shard.counted_C)
    return counted_C.view(-1, batch).T


def _require_layout(layout: object) -> None:
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"layout is a {type(layout).__name__}; expected one of foreroute.layout, of pad(...) or pack(...)"
        )
