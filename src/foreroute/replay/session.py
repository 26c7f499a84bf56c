"""The sessions of a model whose routing can be recorded and replayed, whatever framework it is of.

A framework brings, in this order of the work:

1. `attach(model)`: finds the routers, proves replay on them, and makes the two classes below. A model with one trunk
   goes through `core.attaching.attach_by`, which finds and proves.
2. Hooks of each chunk that a rank runs, derived from `core.hooks.ModelHooks`: `routers` in layer order, and
   `read_args(args, kwargs)`, which says of a call of the trunk how many rows its routers see, and on which device. What
   it returns is handed through as `args`: it holds all that the framework wants to know of the batch. Its `kept()` is
   what a recording needs of it later, in memory that nobody overwrites.
3. A hook of each router, derived from `core.hooks.RouterHook`: `select(now, forward, ...)` runs the router's own
   forward and lets `now`, a `core.selection.LayerPass`, choose (`SelectionMode` does so at a top-k).
4. A model, derived from `RoutedModel`:
   `routes_of(routes, layout, policy)` makes `Routes` of what a user hands to `replay`, once for a session;
   `Routes.of_pass(chunk, args, policy, checks)` finds the rows of one batch by its tokens, and asks `checks` on the
   device whether they are those of the trace;
   `rows_of(passes)` turns what passes recorded into rows without padding, over all ranks;
   where ranks share the rows of a batch or its layers, `ReplayRows.placed` and `sum_over_ranks` are for `RootRows`.
5. Where a schedule runs many micro-batches in one call: `open_replay(session, *session.beside, chunks=...)` around each
   of them.
6. Where plans are executed, an `ep.PlanExecution` in the attribute `execution` of what `Routes` belong to:
   `of_pass` hands `execution.begin_pass(chunk, routes, rows)` on as `ReplayRows.cells`.

Sessions, threads, recomputation, telemetry, masks and errors are written here and in the core, for all frameworks.
`conformance` has the checks that an adapter must pass; docs/new-adapter.md walks through one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.deferred_checks import DeferredChecks
from foreroute.core.hooks import ModelHooks
from foreroute.core.passes import Interceptor, RecordOptions
from foreroute.core.routed import HookedModel, Replaying
from foreroute.core.unopened import opened_by_with
from foreroute.errors import ConfigError, ReplayError
from foreroute.layout import Layout
from foreroute.replay.arguments import as_version, require_switches, require_version
from foreroute.replay.rows import Counts, MissingRows, PaddingRows, Policy, ReplayRows
from foreroute.trace import NO_VERSION, IndexerSpec, RoutingSpec

if TYPE_CHECKING:
    from foreroute.mismatch import RoutingMismatch
    from foreroute.replay.counting import Telemetry
    from foreroute.replay.recording import CheckRollout, ForwardRows, RecordedPass, Recording


class RoutedModel(HookedModel, ABC):
    """Recording and replaying sessions for one model, on one rank. Made by `attach` of a framework's adapter.

    The model is untouched outside a session, and other models never notice. `spec` has experts, picks and routed layers
    of the whole model; `chunk_specs` those of each chunk that this rank runs, None of one without routers; `provenance`
    is of what is recorded.
    """

    padding: PaddingRows = "native"
    """Side that picks for padding, where a replay does not say so."""
    _check_rollout: CheckRollout | None = None
    """Check of the tokens of rollouts, where a framework knows more of them than the trace."""

    def __init__(
        self,
        spec: RoutingSpec,
        chunks: Sequence[ModelHooks],
        chunk_specs: list[RoutingSpec | None],
        provenance: dict[str, str],
    ) -> None:
        super().__init__(chunks)
        self.spec = spec
        self._provenance = provenance
        self.chunk_specs = chunk_specs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r}{', replaying' if self._replayed is not None else ''})"

    @abstractmethod
    def routes_of(self, routes: Any, layout: Layout | None, policy: Policy) -> Routes:
        """Return what a session replays. Raises for what cannot be replayed here."""

    @abstractmethod
    def rows_of(self, passes: list[list[RecordedPass]]) -> list[ForwardRows]:
        """The rows of every recorded forward, from the passes of each chunk. A collective over the model's ranks."""

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        """Add integers up over the ranks that share rows or layers of a batch. A collective of these; by default none.

        Ranks that have the same rows of the same layers are one of them.
        """
        return counts

    @property
    def indexers(self) -> IndexerSpec | None:
        """Choices of sparse attention's indexers; None, as by default, where none can be recorded or replayed."""
        return None

    @property
    def session(self) -> ReplaySession:
        """The replay that is open now, or of the micro-batch that runs; raises `ReplayError` when none is."""
        if not isinstance(self._replayed, ReplaySession):
            raise ReplayError("no micro-batch is being replayed now; ask inside of a replay, after the model has run")
        return self._replayed

    @opened_by_with
    def record(
        self,
        *,
        weight_version: int = NO_VERSION,
        margins: bool = False,
        native: bool = False,
        indexers: bool = False,
    ) -> Iterator[Recording]:
        """Record the routes of every forward of the model while the context is open.

        May be opened inside or around a replay: what is recorded is what was executed, but for `native`.

        Args:
            weight_version: stamped on every row.
            margins: also keep the gap between the K-th and the (K+1)-th selection score.
            native: keep what routers pick natively, also where routes are replayed, and `deficits_NL()` of these.
            indexers: also keep the choices of sparse-attention indexers, as the stream "indexer": 4 bytes per choice.

        Raises:
            ConfigError: for a version that is no whole number, a switch that is neither True nor False, margins beside
                native picks, or choices of indexers that this model does not have.
            ReplayError: when another thread has a session open on the model; and, in a forward, for what cannot be
                recorded.
        """
        from foreroute.replay.recording import Recording

        stamped = as_version(weight_version)
        require_switches(margins=margins, native=native, indexers=indexers)
        if margins and native:
            raise ConfigError("margins and native are both True; open one session for each, one inside of the other")
        if indexers and self.indexers is None:
            raise ConfigError(
                "indexers is True, and this model has no sparse-attention indexer that can be recorded; leave it out"
            )
        asked = {"margins": margins, "native": native, "deficits": native, "others": indexers}
        options = RecordOptions(caches=True, **{name: bool(switch) for name, switch in asked.items()})
        recording = Recording(self.spec, len(self.chunks), self.rows_of, stamped, self._provenance, options)
        recording._check_rollout = self._check_rollout
        with self.listening(recording):
            yield recording

    @opened_by_with
    def replay(
        self,
        routes: Any,
        layout: Layout | None = None,
        *,
        weight_version: int | Collection[int] | None = None,
        missing: MissingRows = "error",
        padding: PaddingRows | None = None,
        counts: Counts = "native",
        telemetry: bool = False,
    ) -> Iterator[ReplaySession]:
        """Force routes in every forward of the model while the context is open.

        Only the selection is forced; gate weights and their gradients come from live scores. Choices of indexers that
        the trace has are forced too. Each forward must run on the sequences of the routes, in order, and its tokens are
        compared with theirs. The last token of each sequence is routed by the model itself. With activations recomputed
        or not, `backward()` may run inside or outside the context.

        Args:
            routes: of the sequences of the batch: a trace, as `trace.select(...)` gives it for a micro-batch. On
                Hugging Face also what `rows` made of one, to be replayed several times; on Megatron-Core also what
                `shard` made, whose policies then hold.
            layout: where the sequences are in the batch, before ranks share it. By default seen from the batch: by its
                mask; packed, by positions that start anew or offsets (`cu_seq_lens_q`, `packed_seq_params`).
            weight_version: when given, the version that every routed row must have been recorded under, or the
                versions that are accepted, such as `range(3, 6)` where rollouts may be two versions old. A range
                accepts no row whose version is not stated.
            missing: what to do when a row has no route other than the last of its sequence: refuse the batch
                ("error"), let the model route it ("native"), or that and take the tokens after it out of the loss by
                `session.loss_mask_BT` ("drop").
            padding: who picks for padding: replay, evenly over experts and their ranks ("spread", the default on
                Megatron-Core, whose dispatcher sends padding to ranks), or the model ("native", on Hugging Face).
            counts: which selection auxiliary losses, expert-bias counters and `expert_counts_LE()` count: the
                router's own ("native") or the executed one ("replayed").
            telemetry: also let each router select by itself, for `session.agreement()` and `expert_counts_LE()`.

        Raises:
            TraceError: when `routes` are none; a derived error for those of another model, weight version or batch.
            ConfigError: for a policy that does not exist, or an argument of the wrong type.
            BatchMismatchError: in the forward, when batch and routes hold different tokens, or rows are missing.
            ReplayError: when a router bypassed replay, no forward ran in the session, or another thread has a session
                open on the model or runs it.
        """
        policy = Policy(missing, self.padding if padding is None else padding, counts, telemetry)
        found = self.routes_of(routes, layout, policy)
        if weight_version is not None and (versions := found.versions) is not None:
            require_version(versions, weight_version, "what is to be replayed")
        session = ReplaySession(found, policy, self.checks, self._telemetry_of(policy))
        counting = self._counting() if counts == "replayed" else nullcontext()
        with self.open_replay(session, *session.beside), counting:
            yield session

    def _telemetry_of(self, policy: Policy) -> Telemetry | None:
        if not policy.telemetry:
            return None
        from foreroute.replay.counting import Telemetry

        return Telemetry(self.chunk_specs)

    def _counting(self) -> AbstractContextManager[None]:
        """Let losses behind the trunk count what was executed while a session is open; nothing by default."""
        return nullcontext()


class Routes(Protocol):
    """The routes of a session, and where a framework's batches take them. Every framework has its own."""

    @property
    def versions(self) -> tuple[int, ...] | None:
        """Weight versions of the routed rows, ascending; None without sequences, which are of no weights."""

    def of_pass(self, chunk: int, args: Any, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        """Find those of a pass that begins, replayed by this policy; in a chunk without routers, for its loss alone.

        Raises `BatchMismatchError` when they do not belong together; what only the device knows, `checks` tell.
        """


class WithTelemetry:
    """Telemetry of one session, or of all micro-batches of a wrapped forward step."""

    telemetry: Telemetry | None

    def agreement(self, chunk: int = 0) -> RoutingMismatch:
        """The model's own selections beside the replayed ones, over all forwards of one chunk so far.

        They are what routers would have picked on the hidden states of the replayed pass. Waits for the device, once.
        Rows and layers are those of this rank; join ranks that share rows with `+`. A recomputation is not counted.

        Raises:
            ReplayError: without `telemetry=True`, or before the first forward.
        """
        return self._required(chunk).agreement(chunk)

    def expert_counts_LE(self, chunk: int = 0) -> NDArray[np.int64]:
        """int64 [L, E], tokens of this rank that each expert was picked for, by the session's `counts`; no padding.

        Raises:
            ReplayError: without `telemetry=True`, or before the first forward.
        """
        return self._required(chunk).expert_counts_LE(chunk)

    def _required(self, chunk: int) -> Telemetry:
        if self.telemetry is None or chunk not in self.telemetry.sums:
            raise ReplayError("no telemetry: open the session with replay(trace, telemetry=True) and run a forward")
        return self.telemetry


class ReplaySession(Replaying, WithTelemetry):
    """Session that `RoutedModel.replay` yields; `num_forwards` are those completed so far, of each chunk."""

    def __init__(
        self,
        routes: Routes,
        policy: Policy,
        checks: DeferredChecks,
        telemetry: Telemetry | None,
    ) -> None:
        self.telemetry = telemetry
        self.beside: tuple[Interceptor, ...] = () if telemetry is None else (telemetry,)  # to be opened with it
        self._routes = routes
        self._policy = policy
        self._checks = checks
        self._now: ReplayRows | None = None
        self._mask_BT: Tensor | None = None
        self._drops = False
        self._mask_was_read = False

    def begin_pass(self, chunk: int, args: Any) -> ReplayRows:
        """Find the routes of the batch."""
        self._now, self._mask_BT = self._routes.of_pass(chunk, args, self._policy, self._checks), None
        self._drops = self._drops or self._now.drops
        return self._now

    def require_replayed(self) -> None:
        """Raise `ReplayError` if no forward ran, or if the loss mask of missing="drop" was never read."""
        super().require_replayed()
        if self._drops and not self._mask_was_read:
            raise ReplayError(
                'rows were missing and missing="drop" was asked for, but nobody read the loss mask: multiply the '
                'loss of each token by session.loss_mask_BT, or let the model route such rows with missing="native"'
            )

    @property
    def loss_mask_BT(self) -> Tensor:
        """Bool [B, T] on the device: tokens of the last forward that belong in the loss, in the place of each token.

        T counts the positions that the model is given, of Megatron on this context-parallel rank. Padding is False;
        under `missing="drop"` so is a token behind a row of its sequence that was not replayed.

        Raises:
            ReplayError: before the first forward.
        """
        if self._now is None or self._now.loss_mask is None:
            raise ReplayError("there is no loss mask before the first forward of a session")
        self._mask_was_read = True
        if self._mask_BT is None:
            self._mask_BT = self._now.loss_mask().clone()  # whoever takes it may write to it
        return self._mask_BT
