"""Replay of integer tensors on a model: what a maintainer of a framework types.

    routed = attach(model)                                   # proves itself, or names the router
    with routed.replay(ids_BTLK, attention_mask):            # -1: not recorded, the router chooses
        loss = model(**batch).loss                           # any checkpointing; backward may run later
    routed.report()                                          # rows replayed, natively differing, of each router

Nothing here waits for the device until somebody asks. Ids are checked on it; what is wrong takes no effect there, and
is told at the end of a later session, or by `report`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from .caches import NO_CACHE, FollowedCache, find_cache, given_cache
from .errors import ReplayError
from .hooks import ModelHooks, SelectingRouter, SelectionHook, overridden
from .passes import LateChecks, Listener, Pass, Rows, Watch, is_in
from .untouched import parameters_kept

Missing = Literal["native", "error"]
"""What to do with rows of -1 that are neither padding nor the last of their sequence."""

UNSIGNED = {
    torch.uint8: torch.int16,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
"""Types without -1, and those that hold their ids beside it."""
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED)
FAULTS = (
    "rows with an id out of range",
    "rows with an expert twice",
    "rows with -1 beside experts",
    "rows of -1 that later tokens depend on",
)

NOTHING_RECORDED = (
    "nothing was recorded: no forward of the attached model ran in the record() session, in the thread that opened it"
)


class LayerReport(NamedTuple):
    """One router, over all sessions: rows that were replayed, and those where it would have picked another set."""

    path: str
    replayed: int
    differing: int


class Routed:
    """A model whose routing can be recorded and replayed as tensors. Made by `attach`; untouched outside of sessions.

    Args:
        model: the model.
        hooks: on it.
    """

    def __init__(self, model: nn.Module, hooks: TrunkHooks) -> None:
        self.model = model
        self.hooks = hooks
        self._counts: Tensor | None = None
        self._checks = LateChecks()

    def rows(
        self,
        ids_BTLK: Tensor,
        attention_mask: Tensor | None = None,
        *,
        missing: Missing = "native",
    ) -> TensorRows:
        """Make routes ready to be replayed, as often as wanted. Arguments and errors as of `replay`."""
        if missing not in get_args(Missing):
            raise ReplayError(f"missing is {missing!r}; expected one of {get_args(Missing)}")
        return TensorRows.made(self.hooks, ids_BTLK, attention_mask, missing)

    @contextmanager
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
        session = _Replaying(rows)
        with self._listening(session):
            yield
        if not session.num_forwards:
            raise ReplayError("nothing was replayed: no forward of the attached model ran in the replay() session")
        counts, before = session.counts, self._counts
        self._counts = counts if before is None or counts is None else before + counts
        self._checks.add(rows.faults.any(), partial(_tell, rows.faults))

    @contextmanager
    def record(self) -> Iterator[TensorRecording]:
        """Keep what routers do in every forward while the context is open.

        Raises:
            ReplayError: in a forward that continues a key-value cache whose rows were changed; at the end, when no
                forward ran, or one began in the middle of its sequences without a cache.
        """
        recording = TensorRecording()
        with self._listening(recording):
            yield recording
        if not recording._passes:
            raise ReplayError(NOTHING_RECORDED)
        for continues in recording.continues:
            self._checks.add(continues, partial(_tell_continued, continues))

    def report(self) -> list[LayerReport]:
        """What was replayed by each router over all sessions so far. Waits for the device.

        Raises:
            ReplayError: when ids that were replayed were wrong.
        """
        self._checks.wait()
        routers, counts = self.hooks.routers, self._counts
        numbers = [(0, 0)] * len(routers) if counts is None else counts.cpu().tolist()
        return [LayerReport(router.path, *pair) for router, pair in zip(routers, numbers, strict=True)]

    @contextmanager
    def _listening(self, listener: Listener) -> Iterator[None]:
        if listener.watch.routes and self.hooks.watch.routes:
            raise ReplayError("this model is already replaying; close that session before opening another")
        with self.hooks.listening(listener):
            yield


@dataclass(frozen=True)
class TrunkArgs:
    """What the shapes of a forward's arguments say.

    Attributes:
        shape: (B, T).
        past: positions that the key-value cache held already; None without one.
        device: of the tokens.
        num_slots: B · T.
        continues: bool [], whether positions say that a row continues what no cache holds; None where none are given.
    """

    shape: tuple[int, int]
    past: int | None
    device: torch.device
    num_slots: int
    continues: Tensor | None = None

    @classmethod
    def of_call(cls, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrunkArgs:
        """Read a call whose parameters have these names.

        Raises:
            ReplayError: when it has no tokens or embeddings, or by its mask continues a cache that is not known.
        """
        given = dict(zip(names, args, strict=False)) | kwargs
        ids = given.get("input_ids")
        tokens = ids if isinstance(ids, Tensor) else given.get("inputs_embeds")
        if not isinstance(tokens, Tensor):
            raise ReplayError("the forward got neither input_ids nor inputs_embeds, so that its rows are not known")
        cache = given_cache(given, ReplayError)
        past = None if cache is None else int(cache.get_seq_length())
        mask = given.get("attention_mask")
        if not past and isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > tokens.shape[1]:
            raise ReplayError(
                f"attention_mask is {list(mask.shape)} for {tokens.shape[1]} tokens a sequence, {NO_CACHE}"
            )
        positions, continues = given.get("position_ids"), None
        # a part of longer sequences, as under context parallelism, is run without a cache
        if not past and isinstance(positions, Tensor) and positions.ndim == 2 and given.get("use_cache") is not False:
            continues = (positions != 0).all(-1).any()
        return cls(
            (tokens.shape[0], tokens.shape[1]), past, tokens.device, tokens.shape[0] * tokens.shape[1], continues
        )


class TrunkHooks(ModelHooks):
    """The hooks of a model with one trunk.

    Args:
        model: that was attached.
        trunk: the module whose forward is one pass.
        routers: as the probe saw them, in the order in which they run.
        others: other modules that select.

    Attributes:
        top_k: K, the most picks that one makes.
        limits_2L: int64 [2, L], E and K of each.
    """

    routers: Sequence[SelectingRouter]

    def __init__(
        self,
        model: nn.Module,
        trunk: nn.Module,
        routers: Sequence[SelectingRouter],
        others: Sequence[SelectionHook] = (),
    ) -> None:
        modules = {trunk, *(hook.selecting[0] for hook in [*routers, *others])}
        super().__init__(0, trunk, routers, list(modules), others)
        self.model = model
        self.top_k = max(router.top_k for router in routers)
        self.limits_2L = torch.tensor([[r.num_experts for r in routers], [r.top_k for r in routers]])
        self.names = list(inspect.signature(trunk.forward).parameters)
        self._cache: FollowedCache | None = None
        self._layer_of = {router.selecting[0]: layer for layer, router in enumerate(routers)}
        self._in_modules = [self._layer_of[module] for module in trunk.modules() if module in self._layer_of]

    @property
    def device(self) -> torch.device | None:
        """Where the weights of the routers are; None where they have none, or accelerate keeps all offloaded."""
        for router in self.routers:
            for parameter in router.selecting[0].parameters():
                if not parameter.is_meta:
                    return parameter.device
        return None

    def session_contexts(self) -> list[AbstractContextManager[Any]]:
        """The trunk, and whatever was compiled on its own with a router in it. See `ModelHooks`.

        Raises:
            ReplayError: when routers have exchanged their places, which a compiled graph would not notice.
        """
        self._cache, self.awaits_backward = None, False
        self.left_behind.clear()
        contexts: list[AbstractContextManager[Any]] = [
            parameters_kept(self.model, lambda: self.awaits_backward, self.left_behind.append),
            overridden(self.trunk, "forward", self.run_trunk),
        ]
        # Dynamo refuses by default to trace a checkpointed region with a function mode in it, because a recomputation
        # would not enter the mode again. It need not: the graph keeps routes. Importing Dynamo would cost seconds.
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            contexts.append(dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True))
        found: list[int] = []
        for path, module in self.trunk.named_modules():
            if module in self._layer_of:
                found.append(self._layer_of[module])
            own = module.__dict__
            # torch.compile(module) makes a wrapper with a `forward` of its own; module.compile() leaves the other
            # attribute
            compiled = "forward" if "dynamo_ctx" in own else "_compiled_call_impl"
            if own.get(compiled) is None:
                continue
            inside = set(module.modules())
            if hooks := [hook for hook in self.every if hook.selecting[0] in inside]:
                contexts.append(overridden(module, compiled, partial(self.run_compiled, path, hooks)))
        for before, now in zip(filter(found.__contains__, self._in_modules), found, strict=True):
            if before != now:
                raise ReplayError(
                    f"router {self.routers[now].path} stands where {self.routers[before].path} stood when the model "
                    "was attached: layers were exchanged since, and routes would follow the modules. Attach again"
                )
        return contexts

    @torch.compiler.disable(recursive=False)  # the host is asked for the rows; what is inside is compiled again
    def run_trunk(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward of the trunk as one pass."""
        call = partial(forward, *args, **kwargs)
        if self.watch.caches:
            call = self.along_cache(call, args, kwargs)
        return self.run_pass(partial(TrunkArgs.of_call, self.names, args, kwargs), call)

    def along_cache(self, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> partial[Any]:
        """A call of the trunk with these arguments that looks at its cache, before and after it."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        self._cache = self._cache or FollowedCache()
        return partial(self._cache.run, find_cache(given.values()), call)

    def run_compiled(
        self, path: str, hooks: Sequence[SelectionHook], call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a layer with a graph of its own, in which its router cannot look around."""
        if self.passes and not torch.compiler.is_compiling():
            self.bind_checkpoints(hooks)
        return call(*args, **kwargs)


class TensorRows(NamedTuple):
    """Routes of a batch, on the device.

    Attributes:
        ids_LBTK: as `Rows.ids_LRK`; rows with a fault are -1.
        faults: int64 [4], how many rows have each of `FAULTS`.
    """

    ids_LBTK: Tensor
    faults: Tensor

    @classmethod
    def made(cls, hooks: TrunkHooks, ids: Tensor, mask: Tensor | None, missing: Missing) -> TensorRows:
        """Check ids [B, T, L, K] against routers, on the device. Raises `ReplayError` for shapes and types."""
        routers = hooks.routers
        top_k = hooks.top_k
        if not isinstance(ids, Tensor) or ids.ndim != 4 or ids.dtype not in INTEGERS:
            raise ReplayError(f"ids are {_described(ids)}; expected integers [B, T, L, K]")
        if ids.shape[2:] != (len(routers), top_k):
            raise ReplayError(
                f"ids have [L, K] = {list(ids.shape[2:])}; the model has {len(routers)} routers of at most {top_k} "
                f"picks, from {routers[0].path} to {routers[-1].path}"
            )
        if mask is not None and mask.shape != ids.shape[:2]:
            raise ReplayError(f"attention_mask is {list(mask.shape)}, ids are {list(ids.shape)} [B, T, L, K]")
        device = hooks.device or ids.device
        ids_LBTK = _signed(_moved(ids, device)).permute(2, 0, 1, 3)
        real_BT = (
            torch.ones(ids.shape[:2], dtype=torch.bool, device=device) if mask is None else _moved(mask, device) != 0
        )
        num_experts_L, top_k_L = _moved(hooks.limits_2L, device)[..., None, None]
        is_pick = torch.arange(top_k, device=device) < top_k_L[..., None]
        given = (ids_LBTK >= 0) & is_pick & real_BT[..., None]
        num_given = given.sum(-1)
        routed = num_given == top_k_L
        too_large = ((ids_LBTK >= num_experts_L[..., None]) & given).any(-1)
        ordered = torch.where(given, ids_LBTK.long(), -1 - torch.arange(top_k, device=device)).sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        in_part = (num_given > 0) & ~routed
        wrong = too_large | twice | in_part
        lacking = torch.zeros_like(real_BT)
        if missing == "error":  # the last real position of a sequence is before no other
            has_later = real_BT.flip(1).cumsum(1).flip(1) > 1
            lacking = (num_given == 0).any(0) & real_BT & has_later
        faults = torch.stack(list(map(Tensor.sum, (too_large, twice, in_part, lacking))))
        is_forced = (routed & ~wrong)[..., None] & is_pick
        return cls(torch.where(is_forced, ids_LBTK, -1).to(hooks.id_dtype), faults)

    def of(self, first: int, num: int) -> Rows:
        """The rows of positions from `first` on; behind the last one there is no route."""
        ids_LBTK = self.ids_LBTK[:, :, first : first + num]
        if lacking := num - ids_LBTK.shape[2]:
            ids_LBTK = functional.pad(ids_LBTK, (0, 0, 0, lacking), value=-1)
        return Rows(ids_LBTK.flatten(1, 2))


class _Replaying(Listener):
    """One open `replay()`, which forces these rows."""

    watch = Watch(routes=True)

    def __init__(self, rows: TensorRows) -> None:
        self.num_forwards = 0
        self.counts: Tensor | None = None
        self._rows = rows

    def begin(self, chunk: int, args: Any) -> Rows:
        """Give the rows of a forward, which may go on with a key-value cache."""
        expected = self._rows.ids_LBTK.shape[1:3]
        goes_on = isinstance(args, TrunkArgs) and args.past is not None
        if args.shape[0] != expected[0] or (args.shape[1] != expected[1] and not goes_on):
            raise ReplayError(
                f"the forward runs on {list(args.shape)} [B, T], the routes are of {list(expected)}; give those of the "
                "batch as the model is given it, padding included"
            )
        return self._rows.of(args.past or 0, args.shape[1])

    def end(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Count rows that were replayed, and those where the router would have picked another set."""
        self.num_forwards += 1
        if current is None or current.rows is None:
            return
        ids, own = current.rows.ids_LRK, current.own_LRK
        routed = ids[..., 0] >= 0
        counts = torch.stack((routed.sum(1), (routed & ~is_in(own, ids).all(-1)).sum(1)), 1)
        self.counts = counts if self.counts is None else self.counts + counts


class TensorRecording(Listener):
    """What routers did in every forward of a `record()`.

    Attributes:
        continues: bool [] of each forward with positions, as `TrunkArgs.continues`.
    """

    watch = Watch(caches=True)

    def __init__(self) -> None:
        self.continues: list[Tensor] = []
        self._passes: list[tuple[Any, Tensor]] = []

    def end(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Keep what ran."""
        if current is None:
            return
        self._passes.append((args, current.executed_LRK))
        if isinstance(args, TrunkArgs) and args.continues is not None:
            self.continues.append(args.continues)

    def ids(self) -> list[Tensor]:
        """[B, T, L, K] of each forward; those that go on with a key-value cache are joined to their first along T.

        Positions that were cut off at the end of the cache before others took their place, such as drafts that a
        sampler rejects, are left out.
        """
        parts: list[list[Tensor]] = []
        begun = reached = 0  # positions, of the first forward of a batch and of the last
        for args, of_rows in self._passes:
            rows = of_rows.unflatten(1, args.shape).permute(1, 2, 0, 3)
            if not args.past or not parts:
                begun = args.past or 0
                parts.append([])
            elif args.past < reached:  # what was cut off at the end of the cache, such as rejected drafts
                parts[-1] = [torch.cat(parts[-1], 1)[:, : max(0, args.past - begun)]]
                begun = min(begun, args.past)
            parts[-1].append(rows)
            reached = (args.past or 0) + args.shape[1]
        return [torch.cat(each, 1) for each in parts]


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """On a device, which is not waited for."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _signed(ids: Tensor) -> Tensor:
    """The same ids in a type that has -1. What -1 became in an unsigned type, in all of several picks, is -1 again."""
    if ids.dtype not in UNSIGNED:
        return ids
    wide = ids.to(UNSIGNED[ids.dtype])
    was_minus_one = wide == (-1 if ids.dtype == torch.uint64 else torch.iinfo(ids.dtype).max)
    wide = wide.where(wide >= 0, torch.iinfo(wide.dtype).max)  # what int64 does not hold is above all ids
    return wide.masked_fill(was_minus_one.all(-1, keepdim=True), -1) if ids.shape[-1] > 1 else wide


def _tell_continued(continues: Tensor) -> None:
    if continues.item():
        raise ReplayError(f"no position of a sequence is 0, {NO_CACHE}")


def _tell(faults: Tensor) -> None:
    totals = zip(faults.cpu().tolist(), FAULTS, strict=True)
    said = ", ".join(f"{total} {what}" for total, what in totals if total)
    if said:
        raise ReplayError(f"the routes had {said}; the model routed these rows itself. Mend the ids that are replayed")
