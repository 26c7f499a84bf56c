"""The sessions of a model whose routing can be recorded and replayed, whatever framework it is of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.hooks import ModelHooks
from foreroute.core.passes import LateChecks, Listener, Pass, Watch
from foreroute.errors import ConfigError, ReplayError
from foreroute.layout import Layout
from foreroute.replay.arguments import as_version, require_version
from foreroute.replay.rows import Counts, MissingRows, PaddingRows, Policy, ReplayRows, require_switches
from foreroute.trace import NO_VERSION, IndexerSpec, RoutingSpec

if TYPE_CHECKING:
    from foreroute.mismatch import LiveAgreement
    from foreroute.replay.recording import ForwardRows, RecordedPass, Recording
    from foreroute.replay.telemetry import Telemetry

Found = TypeVar("Found")


class RoutedModel(ABC):
    """Recording and replaying sessions for one model, on one rank. Made by `attach` of a framework's adapter.

    The model is untouched outside a session, and other models never notice.

    Args:
        spec: experts, picks and routed layers of the whole model.
        hooks: of each chunk that this rank runs.
        chunk_specs: experts, picks and routed layers of each; None of one without routers.
        provenance: of what is recorded.

    Attributes:
        spec: experts, picks and routed layers of the whole model.
        padding: who picks for padding, where a replay does not say so.
    """

    padding: PaddingRows = "native"

    def __init__(
        self,
        spec: RoutingSpec,
        hooks: Sequence[ModelHooks],
        chunk_specs: list[RoutingSpec | None],
        provenance: dict[str, str],
    ) -> None:
        self.spec = spec
        self._hooks = hooks
        self._provenance = provenance
        self._chunk_specs = chunk_specs
        self._session: Callable[[], ReplaySession | None] | None = None

    @abstractmethod
    def routes_of(self, routes: Any, layout: Layout | None, policy: Policy) -> Routes:
        """What a session replays. Raises for what cannot be replayed here."""

    @abstractmethod
    def rows_of(self, passes: list[list[RecordedPass]]) -> list[ForwardRows]:
        """The rows of every recorded forward, from the passes of each chunk. A collective over the model's ranks."""

    @property
    def indexers(self) -> IndexerSpec | None:
        """What indexers of sparse attention may choose; None, as by default, where none can be recorded or replayed."""
        return None

    @property
    def session(self) -> ReplaySession:
        """The replay that is open now, or that of the micro-batch that a wrapped forward step is running.

        Raises:
            ReplayError: when none is.
        """
        session = None if self._session is None else self._session()
        if session is None:
            raise ReplayError("no micro-batch is being replayed now; ask inside of a replay, after the model has run")
        return session

    @contextmanager
    def record(
        self,
        *,
        weight_version: int = NO_VERSION,
        margins: bool = False,
        indexers: bool = False,
    ) -> Iterator[Recording]:
        """Record the routes of every forward of the model while the context is open.

        May be opened inside or around a replay: what is recorded is what was executed.

        Args:
            weight_version: stamped on every row.
            margins: also keep the gap between the K-th and the (K+1)-th selection score.
            indexers: also keep the choices of sparse-attention indexers, as the stream "indexer": 4 bytes per choice.

        Yields:
            The recording; call its `trace()` at any time, on every rank of the model.

        Raises:
            ConfigError: for a version that is no whole number, a switch that is neither True nor False, or choices of
                indexers that this model does not have.
            ReplayError: when another thread has a session open on the model; and, in a forward, for what cannot be
                recorded.
        """
        from foreroute.replay.recording import Recording

        stamped = as_version(weight_version)
        require_switches(margins=margins, indexers=indexers)
        if indexers and self.indexers is None:
            raise ConfigError(
                "indexers is True, and this model has no sparse-attention indexer that can be recorded; leave it out"
            )
        recording = Recording(
            self.spec,
            len(self._hooks),
            self.rows_of,
            stamped,
            self._provenance,
            margins=bool(margins),
            indexers=bool(indexers),
        )
        with self.listening(recording):
            yield recording

    @contextmanager
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

        Hugging Face: sequences are one per row, padded on either side, or several per row where `position_ids` start
        anew at 0 (or `cu_seq_lens_q` says so). Megatron-Core: sequences of the micro-batch are padded on the
        right, or as a layout says, or packed (`packed_seq_params`).

        Args:
            routes: of the sequences of the batch: a trace, as `trace.select(...)` gives it for a micro-batch. On
                Hugging Face also what `rows` made of one, to be replayed several times; on Megatron-Core also what
                `shard` made, whose policies then hold.
            layout: where the sequences are in the batch, before ranks share it. Seen from the batch by default.
            weight_version: when given, the version that every routed row must have been recorded under, or the
                versions that are accepted, such as `range(3, 6)` where rollouts may be two versions old. A range
                accepts no row whose version is not stated.
            missing: what to do when a row has no route other than the last of its sequence: refuse the batch
                ("error"), let the model route it ("native"), or that and take the tokens after it out of the loss by
                `session.loss_mask_BT` ("drop").
            padding: who picks for padding: replay, evenly over experts and their ranks ("spread"), or the model
                ("native"). By default "spread" on Megatron-Core, whose dispatcher sends padding to ranks, and "native"
                on Hugging Face. Megatron-Core leaves padding out of auxiliary losses and expert-bias counters either
                way.
            counts: which selection auxiliary losses, expert-bias counters and `expert_counts_LE()` count: the
                router's own ("native") or the executed one ("replayed").
            telemetry: also let each router select by itself, for `session.agreement()` and `expert_counts_LE()`.

        Yields:
            The session.

        Raises:
            TraceError: when `routes` are none.
            SpecMismatchError: when they belong to another model.
            StaleTraceError: when they were recorded under another weight version.
            ConfigError: for a policy that does not exist, or an argument of the wrong type.
            TraceContentError: when choices of indexers cannot be those of their rows.
            LayoutError: when the layout is none, or is not one of this batch.
            BatchMismatchError: when a layer that routes by a table of tokens says otherwise; in the forward, when batch
                and routes hold different tokens, or rows are missing.
            ReplayError: when a router bypassed replay, no forward ran in the session, or another thread has a session
                open on the model or runs it.
        """
        policy = Policy(missing, self.padding if padding is None else padding, counts, telemetry)
        found = self.routes_of(routes, layout, policy)
        if weight_version is not None:
            require_version(found.versions, weight_version, "what is to be replayed")
        session = ReplaySession(found, policy, self._chunk_specs)
        counting = self._counting() if counts == "replayed" else nullcontext()
        with self.listening(session), self.replaying_now(lambda: session), counting:
            yield session
        session.checks.close()
        session.require_replayed()

    @contextmanager
    def replaying_now(self, session: Callable[[], ReplaySession | None]) -> Iterator[None]:
        """Let `session` be the replay of this model while the context is open. Raises `ReplayError` if it has one."""
        if self._session is not None:
            raise ReplayError("this model is already replaying; close that session before opening another")
        self._session = session
        try:
            yield
        finally:
            self._session = None

    def _counting(self) -> AbstractContextManager[None]:
        """What is open beside a session for losses behind the trunk to count what was executed; nothing by default."""
        return nullcontext()

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Let a listener know of every pass of the model while the context is open, beside sessions or without one."""
        with ExitStack() as stack:
            for hooks in self._hooks:
                stack.enter_context(hooks.listening(listener))
            yield


class PassRoutes(NamedTuple):
    """What a pass replays.

    Attributes:
        rows: of its chunk; None where that has no routers.
        loss_mask: makes bool [B, T], the tokens that belong in the loss, in memory of its own.
        drops: whether the loss must be masked, as rows are missing.
    """

    rows: ReplayRows | None
    loss_mask: Callable[[], Tensor]
    drops: bool


@runtime_checkable
class Routes(Protocol):
    """The routes of a session, and where a framework's batches take them. Every framework has its own."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions of the routed rows, ascending."""

    def of_pass(self, chunk: int, args: Any, policy: Policy, checks: LateChecks) -> PassRoutes:
        """Those of a pass that begins, replayed by this policy.

        Raises:
            BatchMismatchError: when batch and routes do not belong together. What only the device knows of them is
                told by `checks`.
        """


class WithTelemetry:
    """What telemetry says of one session, or of all micro-batches of a wrapped forward step."""

    _telemetry: dict[int, Telemetry]
    """What routers do, added up by chunk."""

    def agreement(self, chunk: int = 0) -> LiveAgreement:
        """The model's own selections beside the replayed ones, over all forwards of one chunk so far.

        Waits for the device, once. Rows and layers are those of this rank; join ranks that share rows with `+`.
        Recomputation in backward is not counted again.

        Raises:
            ReplayError: without `telemetry=True`, or before the first forward.
        """
        return self._added_up(chunk, lambda telemetry: telemetry.agreement())

    def expert_counts_LE(self, chunk: int = 0) -> NDArray[np.int64]:
        """int64 [L, E], tokens of this rank that each expert was picked for, by the session's `counts`; no padding.

        Raises:
            ReplayError: without `telemetry=True`, or before the first forward.
        """
        return self._added_up(chunk, lambda telemetry: telemetry.counts_LE)

    def _added_up(self, chunk: int, figure: Callable[[Telemetry], Found | None]) -> Found:
        kept = self._telemetry.get(chunk)
        found = None if kept is None else figure(kept)
        if found is None:
            raise ReplayError("no telemetry: open the session with replay(trace, telemetry=True) and run a forward")
        return found


class ReplaySession(Listener, WithTelemetry):
    """What `RoutedModel.replay` yields.

    Args:
        routes: to replay.
        policy: how.
        specs: of each chunk; None of one without routers.
        telemetry: where to add up what routers do, by chunk.
        checks: what devices are asked of its batches, where other sessions ask too.

    Attributes:
        num_forwards: completed so far, those of each chunk counted.
        checks: what devices are asked of its batches.
    """

    def __init__(
        self,
        routes: Routes,
        policy: Policy,
        specs: list[RoutingSpec | None],
        telemetry: dict[int, Telemetry] | None = None,
        checks: LateChecks | None = None,
    ) -> None:
        self.num_forwards = 0
        self.checks = LateChecks() if checks is None else checks
        self.watch = Watch(routes=True, scores=policy.telemetry)
        self._routes = routes
        self._telemetry = {} if telemetry is None else telemetry
        self._policy = policy
        self._specs = specs
        self._now: PassRoutes | None = None
        self._mask_BT: Tensor | None = None
        self._drops = False
        self._mask_was_read = False

    def begin(self, chunk: int, args: Any) -> ReplayRows | None:
        """Find the routes of the batch."""
        self._now, self._mask_BT = self._routes.of_pass(chunk, args, self._policy, self.checks), None
        self._drops = self._drops or self._now.drops
        return self._now.rows

    def end(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Add up the telemetry, on the device."""
        self.num_forwards += 1
        spec, rows = self._specs[chunk], None if self._now is None else self._now.rows
        if self._policy.telemetry and current is not None and rows is not None and spec is not None:
            from foreroute.replay.telemetry import Telemetry

            self._telemetry.setdefault(chunk, Telemetry(spec)).add(current, rows)

    def require_replayed(self) -> None:
        """Raise `ReplayError` if it was a session in name only."""
        if not self.num_forwards:
            raise ReplayError("nothing was replayed: no forward of the attached model ran in the replay() session")
        if self._drops and not self._mask_was_read:
            raise ReplayError(
                'rows were missing and missing="drop" was asked for, but nobody read the loss mask: multiply the '
                'loss of each token by session.loss_mask_BT, or let the model route such rows with missing="native"'
            )

    @property
    def loss_mask_BT(self) -> Tensor:
        """Bool [B, T] on the device: tokens of the last forward that belong in the loss, in the place of each token.

        T counts the positions that the model is given, of Megatron on this context-parallel rank. Padding is False.
        Under `missing="drop"` so is a token with a row before it, in its sequence, that was not replayed. To weigh
        predictions made at position p, take `loss_mask_BT[:, 1:]`.

        Raises:
            ReplayError: before the first forward.
        """
        if self._now is None:
            raise ReplayError("there is no loss mask before the first forward of a session")
        self._mask_was_read = True
        if self._mask_BT is None:
            self._mask_BT = self._now.loss_mask()
        return self._mask_BT
