"""A Megatron-Core model whose routing can be recorded and replayed: how its ranks share routes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import megatron.core
import torch
from torch import Tensor, nn

from foreroute.adapters.megatron.forward_args import Call, compare_tokens, find_layout, require_fits
from foreroute.adapters.megatron.hooks import ChunkHooks
from foreroute.adapters.megatron.plan_execution.execution import PlannedExperts
from foreroute.adapters.megatron.recording import rows_over_ranks
from foreroute.adapters.megatron.route_shard import RouteShard, shard
from foreroute.adapters.megatron.schedule import ReplayingStep, routes_in
from foreroute.adapters.planned_model import PlannedModel
from foreroute.core.deferred_checks import DeferredChecks
from foreroute.ep import PlanExecution
from foreroute.ep.execution import MicroBatch
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, TraceError
from foreroute.layout import Layout
from foreroute.replay import ForwardRows, Policy, RecordedPass, ReplayRows
from foreroute.replay.arguments import not_of_kind, require_layout, require_version
from foreroute.replay.indexers import require_choices
from foreroute.replay.rows import Counts, MissingRows, PaddingRows
from foreroute.trace import RoutingSpec, RoutingTrace


class RoutedMegatron(PlannedModel):
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
    spread: PlannedExperts

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
        require_layout(layout, trace)
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

    def routes_of(self, routes: Any, layout: Layout | None, policy: Policy) -> MicroBatchRoutes:
        """Those of one micro-batch, cut to this rank when its forward begins."""
        if isinstance(routes, RouteShard):
            self._require_policies_of(routes, policy)
            self.spec.require_same(routes.spec, what="the routes")
            if layout is not None or routes.layers != self.layers:
                raise BatchMismatchError(
                    "the routes are cut to a rank already: give no layout with them, and only those of this rank"
                )
        else:
            self._require_trace(routes, "what is to be replayed", "a RoutingTrace, or what `shard` made of one")
            if layout is not None:
                require_layout(layout, routes)
        return MicroBatchRoutes(self, routes, layout)

    def rows_of(self, passes: list[list[RecordedPass]]) -> list[ForwardRows]:
        """Over all ranks of the model."""
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
    """The routes of one micro-batch in a session, cut to this rank when its first forward says how it lies.

    A shard waits in queues without a model, and a trace alone does not know its layout: this binds them to the model.
    """

    def __init__(self, routed: RoutedMegatron, routes: RoutingTrace | RouteShard, layout: Layout | None) -> None:
        self.versions = routes.versions
        self._routed, self._routes, self._layout = routed, routes, layout
        self._shard = routes if isinstance(routes, RouteShard) else None

    def of_pass(self, chunk: int, call: Call, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        """Cut the routes, compare the tokens, and move the chunk's part to the device."""
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
        rows = shard.rows(hooks.layers, call.device, mask_padding=hooks.counts_all_ranks, counts=policy.counts)
        cells = execution.begin_pass(chunk, shard, rows) if execution is not None and hooks.layers else None
        _require_tokens(call, shard, checks)
        return replace(
            rows,
            cells=cells,
            loss_mask=partial(_loss_mask, shard, call),
            drops=bool(hooks.trunk.post_process) and shard.dropped_C is not None,
        )


def _require_tokens(call: Call, shard: RouteShard, checks: DeferredChecks) -> None:
    """Compare the tokens of a call, if it has any, with those of routes. Other ones are told late on a device."""
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
