"""Sessions of an attached model, and replay of integer tensors: what a maintainer of a framework types.

    routed = attach(model)                                   # proves itself, or names the router
    with routed.replay(ids_BTLK, attention_mask):            # -1: not recorded, the router chooses
        loss = model(**batch).loss                           # any checkpointing; backward may run later
    routed.report()                                          # rows replayed, natively differing, of each router

Nothing here waits for the device until somebody asks. Ids are checked on it; what is wrong takes no effect there, and
is told at the end of a later session, or by `report`.

Letters: B, T rows and positions of the batch, L routers, K picks, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from .caches import NO_CACHE
from .deferred_checks import DeferredChecks, raise_where
from .errors import ReplayError
from .hooks import ModelHooks
from .passes import Interceptor, Pass, RecordOptions, ReplayCounts, Rows, move_tensor
from .route_ids import INTEGERS, described, find_faults, raise_faults, signed
from .trunk import TrunkArgs, TrunkHooks
from .unopened import opened_by_with

NOTHING_RECORDED = (
    "nothing was recorded: no forward of the attached model ran in the record() session, in the thread that opened it"
)

Missing = Literal["native", "error"]
"""Treatment of rows of -1 that are neither padding nor the last of their sequence."""


class LayerReport(NamedTuple):
    """One router, over all sessions: rows that were replayed, and those where it would have picked another set."""

    path: str
    replayed: int
    differing: int


class Replaying(Interceptor):
    """A session that forces routes."""

    options = RecordOptions(routes=True)
    num_forwards = 0

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Count the pass."""
        self.num_forwards += 1

    def require_replayed(self) -> None:
        """Raise `ReplayError` if no forward ran."""
        if not self.num_forwards:
            raise ReplayError("nothing was replayed: no forward of the attached model ran in the replay() session")


class HookedModel:
    """Opens sessions on the chunks of a model that a rank runs. The model is untouched outside of them."""

    def __init__(self, chunks: Sequence[ModelHooks]) -> None:
        self.chunks = chunks
        self.checks = DeferredChecks()  # one for all chunks, so that one wait before a step reads them
        for hooks in chunks:
            hooks.checks = self.checks
        self._replayed: Replaying | None = None

    @contextmanager
    def listening(self, *interceptors: Interceptor) -> Iterator[None]:
        """Let interceptors stand at both ends of every pass, beside sessions or without one. Raises `ReplayError`."""
        with ExitStack() as stack:
            for hooks in self.chunks:
                stack.enter_context(hooks.listening(*interceptors))
            yield

    @contextmanager
    def open_replay(
        self, session: Replaying, *beside: Interceptor, chunks: Sequence[ModelHooks] | None = None
    ) -> Iterator[None]:
        """Let a session force routes in every pass of chunks, by default of all, while the context is open.

        Raises:
            ReplayError: when the model is replaying already; at the end, when no forward ran.
        """
        with ExitStack() as stack:
            for hooks in self.chunks if chunks is None else chunks:
                stack.enter_context(hooks.listening(session, *beside))
            if self._replayed is not None:
                raise ReplayError("this model is already replaying; close that session before opening another")
            self._replayed = session
            stack.callback(setattr, self, "_replayed", None)
            yield
        session.require_replayed()


class Routed(HookedModel):
    """A model whose routing can be recorded and replayed as tensors. Made by `attach`; untouched outside of sessions.

    Attributes:
        model: that was attached.
        hooks: on it.
    """

    def __init__(self, hooks: TrunkHooks) -> None:
        super().__init__([hooks])
        self.model = hooks.model
        self.hooks = hooks
        self._counts = ReplayCounts()
        self._counts.options = RecordOptions(native=True)  # nobody asks what routers returned

    def __repr__(self) -> str:
        paths = [router.path for router in self.hooks.routers]
        return f"Routed({len(paths)} routers from {paths[0]} to {paths[-1]})"

    def rows(
        self, ids_BTLK: Tensor, attention_mask: Tensor | None = None, *, missing: Missing = "native"
    ) -> TensorRows:
        """Make routes ready to be replayed, as often as wanted. Arguments and errors as of `replay`."""
        if missing not in get_args(Missing):
            raise ReplayError(f"missing is {missing!r}; expected one of {get_args(Missing)}")
        routers, top_k = self.hooks.routers, int(self.hooks.sizes_2L[1].max())
        if not isinstance(ids_BTLK, Tensor) or ids_BTLK.ndim != 4 or ids_BTLK.dtype not in INTEGERS:
            raise ReplayError(f"ids are {described(ids_BTLK)}; expected integers [B, T, L, K]")
        if ids_BTLK.shape[2:] != (len(routers), top_k):
            raise ReplayError(
                f"ids have [L, K] = {list(ids_BTLK.shape[2:])}; the model has {len(routers)} routers of at most "
                f"{top_k} picks, from {routers[0].path} to {routers[-1].path}"
            )
        if attention_mask is not None and attention_mask.shape != ids_BTLK.shape[:2]:
            raise ReplayError(
                f"attention_mask is {list(attention_mask.shape)}, ids are {list(ids_BTLK.shape)} [B, T, L, K]"
            )
        device = self.hooks.device or ids_BTLK.device
        ids_LBTK = signed(move_tensor(ids_BTLK, device)).permute(2, 0, 1, 3)
        if attention_mask is None:
            attention_mask = torch.ones(ids_BTLK.shape[:2], dtype=torch.bool, device=device)
        real_BT = move_tensor(attention_mask, device) != 0
        num_experts_L, top_k_L = move_tensor(self.hooks.sizes_2L, device)[..., None, None]
        is_pick = torch.arange(top_k, device=device) < top_k_L[..., None]
        given = (ids_LBTK >= 0) & is_pick & real_BT[..., None]
        num_given = given.sum(-1)
        routed = num_given == top_k_L
        too_large, twice = find_faults(ids_LBTK, given, num_experts_L[..., None])
        in_part = (num_given > 0) & ~routed
        wrong = too_large | twice | in_part
        lacking = torch.zeros_like(real_BT)
        if missing == "error":  # the last real position of a sequence is before no other
            has_later = real_BT.flip(1).cumsum(1).flip(1) > 1
            lacking = (num_given == 0).any(0) & real_BT & has_later
        faults = torch.stack(list(map(Tensor.sum, (too_large, twice, in_part, lacking))))
        is_forced = (routed & ~wrong)[..., None] & is_pick
        return TensorRows(torch.where(is_forced, ids_LBTK, -1).to(self.hooks.id_dtype), faults)

    @opened_by_with
    def replay(
        self,
        ids_BTLK: Tensor | TensorRows,
        attention_mask: Tensor | None = None,
        *,
        missing: Missing = "native",
    ) -> Iterator[None]:
        """Force routes in every forward of the model while the context is open; backward may run later.

        Args:
            ids_BTLK: integers, the experts of each position of the batch as the model is given it, in the order in
                which routers run; -1 in all K of a row that was not recorded, and in the last ones for a router with
                fewer picks. Or what `rows` made.
            attention_mask: [B, T], zero for padding, which the model routes itself.
            missing: "error" refuses rows of -1 that later tokens depend on. That is found on the device.

        Raises:
            ReplayError: for shapes and types that do not fit; in a forward, when a router bypassed replay; at the end,
                when nothing ran, or ids of an earlier batch were found wrong.
        """
        rows = ids_BTLK
        if not isinstance(rows, TensorRows):
            rows = self.rows(rows, attention_mask, missing=missing)
        with self.open_replay(_TensorReplay(rows), self._counts):
            yield
        self.checks.add(rows.faults.any(), rows.raise_faults)

    @opened_by_with
    def record(self) -> Iterator[TensorRecording]:
        """Keep what routers do in every forward while the context is open.

        Raises:
            ReplayError: in a forward that continues a key-value cache whose rows were changed; at the end, when no
                forward ran, or one began in the middle of its sequences without a cache.
        """
        recording = TensorRecording()
        with self.listening(recording):
            yield recording
        if not recording._passes:
            raise ReplayError(NOTHING_RECORDED)
        for args, _ in recording._passes:
            if isinstance(args, TrunkArgs) and args.continues is not None:
                said = f"no position of a sequence is 0, {NO_CACHE}"
                self.checks.add(args.continues, partial(raise_where, args.continues, said))

    def report(self) -> list[LayerReport]:
        """Report what each router replayed over all sessions so far. Waits for the device.

        Raises:
            ReplayError: when ids that were replayed were wrong.
        """
        self.checks.wait()
        routers, counts = self.hooks.routers, self._counts.layers.get(0)
        numbers_2L = [[0] * len(routers)] * 2
        if counts is not None:
            numbers_2L = torch.stack([counts["decisions"], counts["native_differing_decisions"]]).tolist()
        return [LayerReport(router.path, *numbers) for router, *numbers in zip(routers, *numbers_2L, strict=True)]


class _TensorReplay(Replaying):
    """One open `Routed.replay`."""

    def __init__(self, rows: TensorRows) -> None:
        self._rows = rows

    def begin_pass(self, chunk: int, args: Any) -> Rows:
        """Give the rows of a forward, which may go on with a key-value cache."""
        expected = self._rows.ids_LBTK.shape[1:3]
        goes_on = isinstance(args, TrunkArgs) and args.past is not None
        if args.shape[0] != expected[0] or (args.shape[1] != expected[1] and not goes_on):
            raise ReplayError(
                f"the forward runs on {list(args.shape)} [B, T], the routes are of {list(expected)}; give those of the "
                "batch as the model is given it, padding included"
            )
        return self._rows.of(args.past or 0, args.shape[1])


class TensorRecording(Interceptor):
    """Picks of routers in every forward of a `Routed.record`."""

    options = RecordOptions(caches=True)

    def __init__(self) -> None:
        self._passes: list[tuple[Any, Tensor]] = []  # arguments, and the experts that ran [L, R, K]

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Keep what ran."""
        if current is not None:
            self._passes.append((args, current.executed_LRK))

    def ids(self) -> list[Tensor]:
        """[B, T, L, K] of each forward; those that go on with a key-value cache are joined to their first along T.

        Positions that were cut off at the end of the cache before others took their place, such as drafts that a
        sampler rejects, are left out.
        """
        parts: list[list[Tensor]] = []
        begun = reached = 0  # positions, of the first forward of a batch and of the last
        for args, of_rows in self._passes:
            past = args.past or 0
            if not past or not parts:
                begun = past
                parts.append([])
            elif past < reached:  # what was cut off at the end of the cache, such as rejected drafts
                parts[-1] = [torch.cat(parts[-1], 1)[:, : max(0, past - begun)]]
                begun = min(begun, past)
            parts[-1].append(of_rows.unflatten(1, args.shape).permute(1, 2, 0, 3))
            reached = past + args.shape[1]
        return [torch.cat(each, 1) for each in parts]


class TensorRows(NamedTuple):
    """Routes of a batch on the device, to be replayed as often as wanted. Made by `Routed.rows`."""

    ids_LBTK: Tensor  # as `Rows.ids_LRK`; rows with a fault are -1
    faults: Tensor  # int64 [4], how many rows have each of `FAULTS`

    def of(self, first: int, num: int) -> Rows:
        """Give the rows of positions from `first` on; behind the last one there is no route."""
        ids_LBTK = self.ids_LBTK[:, :, first : first + num]
        if lacking := num - ids_LBTK.shape[2]:
            ids_LBTK = functional.pad(ids_LBTK, (0, 0, 0, lacking), value=-1)
        return Rows(ids_LBTK.flatten(1, 2))

    def raise_faults(self) -> None:
        """Raise `ReplayError` if a row had a fault. Waits for the device."""
        raise_faults(self.faults, "the model routed these rows itself")
