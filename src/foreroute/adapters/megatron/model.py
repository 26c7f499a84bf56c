"""A Megatron-Core model whose routing can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import megatron.core
import numpy as np
from numpy.typing import NDArray
from torch import nn

from foreroute.adapters.megatron.discover import Chunk
from foreroute.adapters.megatron.expert_placement import HomePlacement
from foreroute.adapters.megatron.intercept import Interceptor
from foreroute.adapters.megatron.passes import Listener
from foreroute.adapters.megatron.placing import PaddingRows, PlacedRoutes, place
from foreroute.adapters.megatron.ranks import Share
from foreroute.adapters.megatron.recording import Groups, Recording
from foreroute.adapters.megatron.schedule import ReplayingStep, Routes, RoutesOf, StepListener, routes_in
from foreroute.adapters.megatron.session import Policy, ReplaySession, Telemetry
from foreroute.errors import AttachError, BatchMismatchError, ConfigError, LayoutError, ReplayError
from foreroute.layout import Layout
from foreroute.plan import StepPlan
from foreroute.replay import (
    Counts,
    MissingRows,
    as_version,
    opened_once,
    require_choice,
    require_kind,
    require_switch,
    require_version,
)
from foreroute.trace import NO_VERSION, RoutedLayer, RoutingSpec, RoutingTrace


class RoutedModel:
    """Recording and replaying for one model on one rank. Made by `attach`.

    The model is untouched outside a session, and other models in the process never notice.

    Attributes:
        chunks: what this rank runs: the model, its pipeline stage, or the virtual chunks of that.
        spec: experts, picks and routed layers of the whole model.
        share: which of the rows this rank's routers see.
        layers: the routed layers of this rank, chunk after chunk.
    """

    def __init__(self, chunks: tuple[Chunk, ...], spec: RoutingSpec, share: Share, num_places: int) -> None:
        self.chunks = chunks
        self.spec = spec
        self.share = share
        self._chunk_specs = [_part(spec, tuple(site.layer for site in chunk.sites)) for chunk in chunks]
        sites = [site for chunk in chunks for site in chunk.sites]
        self.layers = tuple(site.layer for site in sites)
        self._homes = HomePlacement(spec, sites, num_places, chunks[0].trunk.pg_collection)
        self._interceptors = [
            Interceptor(chunk, number, self._chunk_specs[number], share.sp) for number, chunk in enumerate(chunks)
        ]
        self._with_loss = frozenset(n for n, chunk in enumerate(chunks) if chunk.trunk.post_process)
        self._chunk_of: dict[int, tuple[nn.Module, int]] = {}
        self._session: Callable[[], ReplaySession | None] | None = None

    @property
    def router_paths(self) -> tuple[str, ...]:
        """Where the routers of this rank are, inside their chunks, in layer order."""
        return tuple(site.path for chunk in self.chunks for site in chunk.sites)

    @property
    def session(self) -> ReplaySession:
        """The replay of the micro-batch that a wrapped forward step, or `replay`, is running now.

        Raises:
            ReplayError: when none is.
        """
        session = None if self._session is None else self._session()
        if session is None:
            raise ReplayError("no micro-batch is being replayed now; ask inside of a replay, after the model has run")
        return session

    def place(
        self, trace: RoutingTrace, layout: Layout, *, missing: MissingRows = "error", padding: PaddingRows = "spread"
    ) -> PlacedRoutes:
        """Cut the routes of one micro-batch to this rank's rows and layers, to wait for it in little memory.

        Args:
            trace: routes of the micro-batch's sequences.
            layout: where they are in the batch, before ranks share it: `layout.pad(trace.lengths, side=...,
                order="sbhd")` for a padded [B, T] batch, `layout.pack(trace.lengths, ...)` for a packed one.
            missing: as in `replay`.
            padding: as in `replay`.

        Raises:
            TraceError: when `trace` is none.
            SpecMismatchError: when the trace belongs to another model.
            BatchMismatchError: when the layout is for other rows, or rows are missing.
            LayoutError: when ranks cannot share the layout.
        """
        require_kind("what is to be placed", trace, RoutingTrace, "a RoutingTrace")
        _require_layout(layout)
        self.spec.require_same(trace.spec, what="the trace")
        require_choice("missing", missing, MissingRows)
        require_choice("padding", padding, PaddingRows)
        pin = next(self.chunks[0].trunk.parameters()).is_cuda
        home_LE = self.home_LE[[self.spec.layers.index(layer) for layer in self.layers]]
        return place(trace, layout, self.share, self.layers, home_LE, missing=missing, padding=padding, pin=pin)

    @opened_once
    def record(self, *, weight_version: int = NO_VERSION) -> Iterator[Recording]:
        """Record the routes of every forward of the model while the context is open.

        May be opened around `replay` and wrapped forward steps: what is recorded is what was executed.

        Args:
            weight_version: stamped on every row.

        Yields:
            The recording; call its `trace()` on every rank.

        Raises:
            ConfigError: for a version that is no whole number.
            ReplayError: when another thread has a session open on the model; and, in a forward, for what cannot be
                recorded.
        """
        stamped = as_version(weight_version)
        provenance = {"engine": "megatron-core", "engine_version": megatron.core.__version__}
        trunk = self.chunks[0].trunk
        groups = Groups(
            trunk.tp_group if self.share.sp > 1 else None,
            trunk.cp_group if self.share.cp > 1 else None,
            trunk.pg_collection.pp,
        )
        layers = [tuple(site.layer for site in chunk.sites) for chunk in self.chunks]
        recording = Recording(self.spec, layers, self.share, groups, stamped, provenance)
        with self._listening(recording):
            yield recording

    @opened_once
    def replay(
        self,
        routes: Routes,
        layout: Layout | None = None,
        *,
        weight_version: int | Collection[int] | None = None,
        missing: MissingRows = "error",
        padding: PaddingRows = "spread",
        counts: Counts = "native",
        telemetry: bool = False,
    ) -> Iterator[ReplaySession]:
        """Force the routes of one micro-batch in every forward of the model while the context is open.

        Only the selection is forced; gate weights and their gradients come from live scores. `backward()` may run
        inside or outside of the context, with activations recomputed or not.

        Args:
            routes: of the micro-batch's sequences: a trace, or what `place` made of one (whose policies then hold).
            layout: where the sequences are in the batch, before ranks share it. Seen from the batch by default: its
                `packed_seq_params`, or else its tokens.
            weight_version: when given, the version that every routed row must have been recorded under, or the
                versions that are accepted, such as `range(3, 6)` where rollouts may be two versions old. A range
                accepts no row whose version is not stated.
            missing: what to do when a row has no route other than the last of its sequence: refuse the batch
                ("error"), let the model route it ("native"), or that and take the tokens after it out of the loss by
                `session.loss_mask_BT` ("drop").
            padding: who picks for padding: replay, evenly over expert-parallel ranks ("spread"), or the model
                ("native"). Padding is left out of auxiliary losses and expert-bias counters either way.
            counts: which selection auxiliary losses and expert-bias counters count: the router's own ("native") or the
                executed one ("replayed").
            telemetry: also let each router select by itself, for `session.agreement()`.

        Yields:
            The session.

        Raises:
            TraceError: when `routes` are none.
            SpecMismatchError: when the routes belong to another model.
            StaleTraceError: when they were recorded under another weight version.
            ConfigError: for a policy that does not exist, or an argument of the wrong type.
            BatchMismatchError: in the forward, when batch and routes hold different tokens, or rows are missing.
            ReplayError: when a router bypassed replay, no forward ran in the session, or another thread has a session
                open on the model or runs it.
        """
        policy = _checked_policy(Policy(missing, padding, counts, telemetry))
        session = self._session_for(routes, layout, policy, {})
        require_version(routes.versions, weight_version, "what is to be replayed")
        with self._listening(session), self._exclusively(lambda: session):
            yield session
        session.close()

    def replaying(
        self,
        forward_step: Callable[..., Any],
        *,
        routes_of: RoutesOf = routes_in,
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
            routes_of: finds the routes in a batch, a trace or what `place` made of one, or None; `batch["routes"]`
                or `batch.routes` by default.
            missing: as in `replay`. The mask of "drop" is `routed.session.loss_mask_BT`, inside the step.
            padding: as in `replay`.
            counts: as in `replay`.
            telemetry: as in `replay`; ask the wrapped step for its `agreement()`.

        Returns:
            The step, to be called like the one that was given.
        """
        policy = _checked_policy(Policy(missing, padding, counts, telemetry))
        for name, given in (("forward_step", forward_step), ("routes_of", routes_of)):
            if not callable(given):
                raise ConfigError(f"{name} is a {type(given).__name__}; expected a function")

        def open_session(routes: Routes, sums: dict[int, Telemetry]) -> ReplaySession:
            return self._session_for(routes, None, policy, sums)

        return ReplayingStep(forward_step, routes_of, open_session, self._running, policy.watch)

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
            homes: a plan without replicas, or integers [L, E] for the routed layers of `spec`: the rank of the
                expert-parallel group that each expert lives on from now on, E / G on each. The same on every rank.
            optimizer: the one that trains the experts, of torch or of Megatron; None where none does.

        Returns:
            Bytes that this rank received from others.

        Raises:
            PlanError: on every rank alike, when homes differ between ranks, are of other layers, experts or ranks, or
                not E / G to a rank, or a plan has replicas.
            TransferError: on every rank alike, when something cannot be moved, such as an expert with a gradient or
                state of an unknown kind, or a rank is gone. Nothing has moved then.
        """
        return self._homes.move(homes, optimizer)

    @contextmanager
    def _running(self, model: nn.Module, listener: StepListener) -> Iterator[None]:
        """A forward step on one of the chunks, wrapped or not."""
        number = self._number_of(model)
        with self._interceptors[number].listening(listener), self._exclusively(lambda: listener.session):
            yield

    @contextmanager
    def _exclusively(self, session: Callable[[], ReplaySession | None]) -> Iterator[None]:
        if self._session is not None:
            raise ReplayError("this model is already replaying; close that session before opening another")
        self._session = session
        try:
            yield
        finally:
            self._session = None

    @contextmanager
    def _listening(self, listener: Listener) -> Iterator[None]:
        with ExitStack() as stack:
            for interceptor in self._interceptors:
                stack.enter_context(interceptor.listening(listener))
            yield

    def _session_for(
        self, routes: Routes, layout: Layout | None, policy: Policy, telemetry: dict[int, Telemetry]
    ) -> ReplaySession:
        require_kind("what is to be replayed", routes, Routes, "a RoutingTrace, or what `place` made of one")
        self.spec.require_same(routes.spec, what="the routes" if isinstance(routes, PlacedRoutes) else "the trace")
        if layout is not None:
            _require_layout(layout)
        if isinstance(routes, PlacedRoutes) and (layout is not None or routes.layers != self.layers):
            raise BatchMismatchError(
                "the routes are placed already: give no layout with them, and only those that were placed on this rank"
            )
        cut = partial(self.place, missing=policy.missing, padding=policy.padding)
        return ReplaySession(routes, layout, cut, self.share, self._chunk_specs, self._with_loss, policy, telemetry)

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


def _part(spec: RoutingSpec, layers: tuple[RoutedLayer, ...]) -> RoutingSpec | None:
    return RoutingSpec(spec.num_experts, spec.top_k, layers, model=spec.model) if layers else None


def _checked_policy(policy: Policy) -> Policy:
    require_choice("missing", policy.missing, MissingRows)
    require_choice("padding", policy.padding, PaddingRows)
    require_choice("counts", policy.counts, Counts)
    require_switch("telemetry", policy.telemetry)
    return policy


def _require_layout(layout: object) -> None:
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"layout is a {type(layout).__name__}; expected one of foreroute.layout, of pad(...) or pack(...)"
        )
