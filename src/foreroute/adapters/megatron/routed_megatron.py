"""A Megatron-Core model whose routing can be recorded and replayed: how its ranks share routes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import megatron.core
import torch
from torch import Tensor, nn

from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.adapters.megatron.planned_experts import PlannedExperts
from foreroute.adapters.megatron.recording import rows_over_ranks
from foreroute.adapters.megatron.route_shard import CutMissing, RouteShard, UncutRoutes, shard
from foreroute.adapters.megatron.schedule import ReplayingStep, routes_in
from foreroute.adapters.planned_model import PlannedModel
from foreroute.ep import PlanExecution
from foreroute.ep.execution import MicroBatch
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, TraceError
from foreroute.layout import Layout
from foreroute.replay import ForwardRows, Policy, RecordedPass
from foreroute.replay.arguments import not_of_class, require_choice, require_layout, require_version
from foreroute.replay.indexers import require_choices
from foreroute.replay.rows import Counts, MissingRows, PaddingRows
from foreroute.trace import RoutingSpec, RoutingTrace


class RoutedMegatron(PlannedModel):
    """Recording and replaying sessions for one Megatron-Core model, on one rank. Made by `attach`.

    Attributes:
        chunks: what this rank runs: the model, its pipeline stage, or the virtual chunks of that.
        layers: the routed layers of this rank, chunk after chunk.
        native_routers: names of the model's routers beside its decoder, on any pipeline stage: those of multi-token
            prediction. They are not in `spec`, route natively and run at home.
        share: which of the rows this rank's routers see.
        spread: its experts, on which plans are executed.
        execution: the plan that is executed now, or None.
    """

    padding: PaddingRows = "spread"
    chunks: Sequence[ChunkHooks]
    spread: PlannedExperts

    def __init__(
        self, chunks: Sequence[ChunkHooks], spec: RoutingSpec, ep_size: int, native_routers: tuple[str, ...]
    ) -> None:
        made_by = {"engine": "megatron-core", "engine_version": megatron.core.__version__}
        of_chunks = [
            RoutingSpec(spec.num_experts, spec.top_k, each.layers, model=spec.model) if each.layers else None
            for each in chunks
        ]
        super().__init__(spec, chunks, of_chunks, made_by)
        self.layers = tuple(layer for each in chunks for layer in each.layers)
        self.native_routers = native_routers
        self.share = chunks[0].share
        self.spread = PlannedExperts(spec, chunks, ep_size)
        self.execution: PlanExecution | None = None
        for each in chunks:
            each.holder = self
        self._hooks_of: dict[int, tuple[nn.Module, ChunkHooks]] = {}

    def shard(
        self,
        trace: RoutingTrace,
        layout: Layout,
        *,
        weight_version: int | Collection[int] | None = None,
        missing: CutMissing = "error",
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
        require_layout(layout, trace)
        if weight_version is not None:
            require_version(trace.versions, weight_version, "the trace")
        require_choice("missing", missing, CutMissing)
        require_choice("padding", padding, PaddingRows)
        return self._cut(trace, layout, missing=missing, padding=padding)

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
        forward and recomputation, and one whose routes are None is routed natively. Every stage and virtual chunk must
        be given the batch, since each replays layers of its own.

        Args:
            forward_step: `forward_step(data_iterator, model, ...)`.
            routes_of: finds the routes in a batch, a trace or what `shard` made of one, or None; `batch["routes"]`
                or `batch.routes` by default, without which the step raises `BatchMismatchError`.
            missing: as in `replay`, for traces. The mask of "drop" is `routed.session.loss_mask_BT`, inside the step.
            padding: as in `replay`, for traces.
            counts: as in `replay`.
            telemetry: as in `replay`; ask the wrapped step, which is returned, for its `agreement()`.
        """
        policy = Policy(missing, padding, counts, telemetry)
        for name, given in (("forward_step", forward_step), ("routes_of", routes_of)):
            if not callable(given):
                raise ConfigError(f"{name} is a {type(given).__name__}; expected a function")
        sums = self._telemetry_of(policy)
        return ReplayingStep(self, forward_step, routes_of, policy, sums)

    @property
    def _experts(self) -> PlannedExperts:
        return self.spread

    @property
    def _execution_holder(self) -> RoutedMegatron:
        return self

    def _planned_batches(self, given: Sequence[RouteShard]) -> list[MicroBatch]:
        for number, each in enumerate(given):
            if not isinstance(each, RouteShard):
                raise TraceError(
                    f"micro-batch {number} is a {type(each).__name__}; expected what routed.shard(trace, layout) makes"
                )
        return [MicroBatch(each, each.counts_LE, each.is_whole) for each in given]

    def routes_of(self, routes: Any, layout: Layout | None, policy: Policy) -> RouteShard | UncutRoutes:
        """Those of one micro-batch, cut to this rank; without a layout, when its forward begins."""
        if isinstance(routes, RouteShard):
            self.spec.require_same(routes.spec, what="the routes")
            if layout is not None or routes.layers != self.layers:
                raise BatchMismatchError(
                    "the routes are cut to a rank already: give no layout with them, and only those of this rank"
                )
            for name, asked, default, cut in (  # defaults give way to what the cut says
                ("missing", policy.missing, "error", routes.missing),
                ("padding", policy.padding, self.padding, routes.padding),
            ):
                if asked not in (default, cut):
                    raise ConfigError(
                        f"{name} is {asked!r}, and the routes were cut with {name}={cut!r}; give it to routed.shard()"
                    )
            return routes
        self._require_trace(routes, "what is to be replayed", "a RoutingTrace, or what `shard` made of one")
        cut_to = partial(self._cut, routes, missing=policy.missing, padding=policy.padding)
        if layout is None:
            return UncutRoutes(routes, cut_to)
        require_layout(layout, routes)
        return cut_to(layout)

    def rows_of(self, passes: list[list[RecordedPass]]) -> list[ForwardRows]:
        """Over all ranks of the model."""
        return rows_over_ranks(
            passes, self.spec, [each.layers for each in self.chunks], self.share, self.chunks[0].trunk.pg_collection
        )

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Over pipeline stages, and ranks of sequence and context parallelism."""
        trunk: Any = self.chunks[0].trunk
        total = counts.clone()
        for group in (trunk.pg_collection.pp, self.share.sp_group, self.share.cp_group):
            if group is not None and group.size() > 1:
                torch.distributed.all_reduce(total, group=group)
        return total

    def _require_trace(self, trace: object, what: str, expected: str) -> None:
        if not isinstance(trace, RoutingTrace):
            raise not_of_class(what, trace, expected)
        self.spec.require_same(trace.spec, what="the trace")
        require_choices(trace, self.indexers)

    def _cut(self, trace: RoutingTrace, layout: Layout, *, missing: CutMissing, padding: PaddingRows) -> RouteShard:
        home_LE = self.home_LE[[self.spec.layers.index(layer) for layer in self.layers]]
        return shard(trace, layout, self.share, self.layers, home_LE, missing=missing, padding=padding)

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
