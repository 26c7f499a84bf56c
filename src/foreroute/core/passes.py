"""A pass: one forward of a model, and what its routers do in it, as tensors on its device.

Only the selection is replaced. A router computes scores, selects K experts, and turns the scores of the selected ones
into gate weights. Whatever its own rule is, it is evaluated at the forced experts, on live scores, with live gradients:

    g_i = exp(s_i) / sum_{j in I} exp(s_j)   for i in the replayed set I, else 0

for the softmax family (Rollout Routing Replay, arXiv 2510.11370, section 4.1).

Absence is data: an id of -1 stands for a row that has no route. So the host knows nothing of which rows these are, and
nothing here waits for the device. What routers pick natively is kept, and a recomputation runs the same experts as the
forward in rows without a route too.

Letters: L routers in forward order, R rows of the batch as they see them, K picks, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .errors import ReplayError
from .selection import LayerPass

if TYPE_CHECKING:
    from .hooks import RouterHook


@dataclass(frozen=True)
class Rows:
    """Routes of a flattened batch, made once on the device and replayed as often as wanted.

    Attributes:
        ids_LRK: signed integers [L, R, K], the experts to run; -1 where the router chooses.
        real_R: bool [R], False for padding; None where every row with a route is real.
        is_complete: whether every row has a route, as far as the host knows, so that no router has to choose. One that
            has none all the same runs expert 0 until a check tells of it.
    """

    ids_LRK: Tensor
    real_R: Tensor | None = None
    is_complete: bool = False


class RecordOptions(NamedTuple):
    """Options of what is kept of a pass beside native picks, and whether it is given routes."""

    routes: bool = False  # it is given those to force
    native: bool = False  # of rows that are replayed too
    margins: bool = False  # see `Pass.margin_LR`; native picks are kept then
    deficits: bool = False  # see `Pass.deficit_LR`; takes `native` too
    outputs: bool = False  # which experts routers returned under replay; in eager mode alone
    others: bool = False  # what other modules that select returned; in eager mode alone
    caches: bool = False  # key-value caches must hold the same rows from forward to forward; in eager mode alone


class Pass:
    """One forward over one batch, and what it keeps.

    Attributes:
        margin_LR: float32 [L, R] on the device, the K-th minus the (K+1)-th selection score of a router, in its own
            scale; 0 where it picks all experts, and None where it was not asked for.
        deficit_LR: float32 [L, R] on the device, the least selection score of the native picks less the least of the
            executed ones, of a softmax in logits; 0 where they are the same, and None where it was not asked for. A row
            whose native picks are others in a replayed pass is a root: all before it is the engine's, and the router
            would still choose otherwise. A near-tie has a small deficit, a defect a large one.
    """

    def __init__(
        self,
        routers: Sequence[RouterHook],
        num_rows: int,
        id_dtype: torch.dtype,  # of the picks that are kept: signed
        device: torch.device,
        rows: Rows | None,
        options: RecordOptions,
        num_others: int = 0,  # other modules that select
    ) -> None:
        num_layers = len(routers)
        shape = num_layers, num_rows, max(map(attrgetter("top_k"), routers))
        if rows is not None and rows.ids_LRK.shape != shape:
            raise ReplayError(
                f"the routes are {list(rows.ids_LRK.shape)} [L, R, K], the routers select {list(shape)}; a router that "
                "sees only part of the batch cannot be replayed"
            )
        self.rows = rows
        self.options = options
        # what routers picked; -1 where they have not selected, or have fewer picks, or nobody asks them
        self.native_LRK = torch.full(shape, -1, dtype=id_dtype, device=device)
        self.margin_LR = torch.zeros(shape[:2], device=device) if options.margins else None
        self.deficit_LR = torch.zeros(shape[:2], device=device) if options.deficits else None
        # how often each router, and behind them each other module, has selected: outside of graphs, and inside
        self.calls = [0] * (num_layers + num_others)
        self.calls_L = torch.zeros(num_layers + num_others, dtype=torch.int32, device=device)
        self.num_expected = num_layers  # how many of these must select, each once
        self.others: Sequence[tuple[Any, Any]] = ()  # what each other module does in the pass, and in recomputation
        self.returned: dict[int, Tensor] = {}  # by other modules, by their number
        # by layer, what a router returned: its ids [R, K] as they are, or bool [R], whether the replayed ones are in it
        self.outputs: dict[int, Tensor] = {}
        self.with_grad = torch.is_grad_enabled()
        self.last_layer = -1  # of the router that ran last, outside of graphs
        self._routers = routers
        self._parts: dict[bool, list[Any]] = {}

    @property
    def executed_LRK(self) -> Tensor:
        """[L, R, K], the experts that ran."""
        if self.rows is None:
            return self.native_LRK
        if self.rows.is_complete:
            return self.rows.ids_LRK
        return torch.where(self.rows.ids_LRK < 0, self.native_LRK, self.rows.ids_LRK)

    @property
    def replayed_LR(self) -> Tensor:
        """Bool [L, R], whether a row was replayed that is no padding; of a pass with `rows`."""
        assert self.rows is not None
        has_route_LR = self.rows.ids_LRK[..., 0] >= 0
        return has_route_LR if self.rows.real_R is None else has_route_LR & self.rows.real_R

    @property
    def roots_LR(self) -> Tensor:
        """Bool [L, R], those of `replayed_LR` in which the router would pick another set."""
        assert self.rows is not None
        return ~is_in(self.native_LRK, self.rows.ids_LRK).all(-1) & self.replayed_LR

    def parts(self, *, is_recompute: bool = False) -> list[Any]:
        """Give what each router does, and then each other module, in the forward or in a recomputation of it."""
        if is_recompute not in self._parts:
            parts = self._recomputed_parts() if is_recompute else self._forward_parts()
            self._parts[is_recompute] = [*parts, *map(itemgetter(is_recompute), self.others)]
        return self._parts[is_recompute]

    def _forward_parts(self) -> list[LayerPass]:
        num_layers, rows = len(self._routers), self.rows
        most = self.native_LRK.shape[-1]
        # One graph serves forward and recomputation, so that both read picks from a tensor and write them to another.
        # The forward finds that nothing was picked before.
        nothing_RK = self.native_LRK.new_full(self.native_LRK.shape[1:], -1)
        nothing: Sequence[Any] = [None] * num_layers
        forced, absent, deficits = nothing, nothing, nothing
        margins = nothing if self.margin_LR is None else self.margin_LR.unbind()
        if rows is not None:
            ids_LRK = rows.ids_LRK.long()
            # a row that has none all the same must not index anything until a check has told of it
            forced = (ids_LRK.clamp(min=0) if rows.is_complete else ids_LRK).unbind()
            absent = (rows.ids_LRK[..., :1] < 0).unbind()
            deficits = deficits if self.deficit_LR is None else self.deficit_LR.unbind()
        parts: list[LayerPass] = []
        calls = self.calls_L[:num_layers].split(1)
        of_layers = zip(self._routers, calls, self.native_LRK.unbind(), forced, absent, margins, deficits, strict=True)
        for layer, (router, calls_1, into_RK, ids_RK, absent_R1, margin_into, deficit_into) in enumerate(of_layers):
            what = LayerPass(
                path=router.path,
                layer=layer,
                is_recompute=False,
                asks=self.options.native or self.options.margins or rows is None or not rows.is_complete,
                calls_1=calls_1,
                rows=rows,
                into_RK=into_RK,
                before_RK=nothing_RK,
                ids_RK=ids_RK,
                absent_R1=absent_R1,
                margin_into=margin_into,
                deficit_into=deficit_into,
                by_softmax=router.by_softmax,
            )
            parts.append(what if router.top_k == most else what.of_picks(slice(router.top_k)))
        return parts

    def _recomputed_parts(self) -> list[LayerPass]:
        """Give the same with what the forward picked, which is not asked for anew; what is written, nobody reads."""
        nothing_RK = self.native_LRK.new_full(self.native_LRK.shape[1:], -1)
        return [
            replace(
                part,
                is_recompute=True,
                asks=False,
                into_RK=nothing_RK[:, : part.into_RK.shape[1]],
                before_RK=part.into_RK,
            )
            for part in self.parts()[: len(self._routers)]
        ]


class ThreadGuard:
    """Belongs to a thread while that holds it, as often as it wants. Nobody holds a copy."""

    def __init__(self, held_for: str) -> None:
        self._held_for = held_for  # what the holder does, for messages
        self.lock = threading.RLock()  # a session may be collected, and so closed, at any moment
        self._times = 0
        self.thread: int | None = None
        self._name = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadGuard, (self._held_for,)

    @contextmanager
    def held(self, doing: str) -> Iterator[None]:
        """Hold it while the context is open, which may be closed in any thread. Raises as `require_mine`."""
        with self.lock:
            self.require_mine(doing)
            self._times += 1
            self.thread, self._name = threading.get_ident(), threading.current_thread().name
        try:
            yield
        finally:
            with self.lock:
                self._times -= 1
                if not self._times:
                    self.thread = None

    def require_mine(self, doing: str) -> None:
        """Raise `ReplayError` if another thread holds it."""
        # Read once: another thread may let go at any moment, and no lock is taken on the way of every router.
        thread = self.thread
        if thread is not None and thread != threading.get_ident():
            raise ReplayError(
                f"thread {threading.current_thread().name!r} {doing}, while thread {self._name!r} {self._held_for}. "
                "One model is recorded and replayed by one thread at a time: run it in the thread that opened the "
                "session, close the session first, or give each thread a copy of the model"
            )


class PassStack:
    """The passes of one model that are under way: the last to begin decides. False when there is none."""

    def __init__(self, hooks: Sequence[Any]) -> None:  # whose `now` is their part of the pass that decides
        self.current: Any = None  # the pass that decides
        self.is_recompute = False  # whether a part of it is run again
        self.guard = ThreadGuard("is in the middle of a forward or a recomputation of it")
        self._hooks = hooks

    def __bool__(self) -> bool:
        return self.current is not None

    @contextmanager
    def running(self, current: Pass, *, is_recompute: bool = False) -> Iterator[None]:
        """Let this pass decide while the context is open. Raises `ReplayError` if another thread is inside of one."""
        # a graph is traced in the thread that runs it, and holds no locks
        with nullcontext() if torch.compiler.is_compiling() else self.guard.held("runs a model"):
            before = self.current, self.is_recompute
            self._set(current, is_recompute)
            try:
                yield
            finally:
                self._set(*before)

    def _set(self, current: Pass | None, is_recompute: bool) -> None:
        self.current, self.is_recompute = current, is_recompute
        parts = [None] * len(self._hooks) if current is None else current.parts(is_recompute=is_recompute)
        for hook, part in zip(self._hooks, parts, strict=True):
            hook.now = part


class ForwardArgs(Protocol):
    """Facts about a batch in the arguments of one forward. Every framework has its own."""

    @property
    def num_router_rows(self) -> int:
        """R, rows of the batch that routers see, padding included."""

    @property
    def device(self) -> torch.device:
        """Device on which the model takes them."""


class Interceptor:
    """Listener at both ends of every pass while it is open: sessions, and what counts beside them.

    The default does nothing. `chunk` is the number of what a rank runs in one go; 0 where it runs the whole model.
    """

    options = RecordOptions()

    def begin_pass(self, chunk: int, args: Any) -> Rows | None:
        """Give the routes to force on a pass that begins, or None."""
        return None

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Take what a pass kept, in which every router selected once; None of a chunk without routers."""


class ReplayCounts(Interceptor):
    """Counts what passes replayed, on the device: nothing here waits.

    A decision is a row in one layer. Those that were replayed count, padding left out. One differs where the router
    returned other experts than the replayed ones, and natively where it would have picked others. What it returns
    inside a compiled graph nobody sees, so that no decision of that layer differs; a capacity may drop replayed ones.
    """

    options = RecordOptions(outputs=True, native=True)
    NAMES = ("rows", "differing_rows", "decisions", "differing_decisions", "native_differing_decisions")

    def __init__(self) -> None:
        self.layers: dict[int, dict[str, Tensor]] = {}  # by chunk, and by each of `NAMES` of decisions: int64 [L]
        self._rows: dict[str, Tensor] = {}

    @property
    def sums(self) -> dict[str, Tensor]:
        """Each of `NAMES`, int64 [] on the device; nothing before the first replayed pass."""
        sums = dict(self._rows)
        for layers in self.layers.values():
            add_to(sums, {name: each.sum() for name, each in layers.items()})
        return sums

    def end_pass(self, chunk: int, args: Any, current: Pass | None) -> None:
        """Add a pass that replayed rows."""
        if current is None or current.rows is None:
            return
        ids_LRK, replayed_LR = current.rows.ids_LRK, current.replayed_LR
        differs_LR = ~_obeyed(current.outputs, ids_LRK) & replayed_LR
        of_layers = zip(self.NAMES[2:], (replayed_LR, differs_LR, current.roots_LR), strict=True)
        add_to(self.layers.setdefault(chunk, {}), {name: each.sum(1) for name, each in of_layers})
        add_to(self._rows, {"rows": replayed_LR.any(0).sum(), "differing_rows": differs_LR.any(0).sum()})


def _obeyed(outputs: dict[int, Tensor], ids_LRK: Tensor) -> Tensor:
    """Bool [L, R], whether routers returned these experts, from `Pass.outputs`; True where nothing was seen."""
    if len(outputs) == len(ids_LRK) and all(each.shape == ids_LRK.shape[1:] for each in outputs.values()):
        return (torch.stack([outputs[layer] for layer in range(len(ids_LRK))]) == ids_LRK).all(-1)
    obeyed_LR = torch.ones(ids_LRK.shape[:2], dtype=torch.bool, device=ids_LRK.device)
    for layer, each in outputs.items():
        # a router may have fewer picks than another
        is_ids = each.ndim > 1
        obeyed_LR[layer] = (each == ids_LRK[layer, :, : each.shape[1]]).all(-1) if is_ids else each
    return obeyed_LR


def add_to(sums: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Add tensors to those of their names, or begin with them."""
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def is_in(ids_LRK: Tensor, others_LRK: Tensor) -> Tensor:
    """Bool [L, R, K], which ids are among the other K of their row. Takes memory of the size of its result only."""
    found = ids_LRK == others_LRK[..., :1]
    for k in range(1, others_LRK.shape[-1]):
        found |= ids_LRK == others_LRK[..., k : k + 1]
    return found


def signed_dtype(num_experts: int) -> torch.dtype:
    """The narrowest type of ids on the device, in which -1 is none."""
    if num_experts > 2**15:
        return torch.int32
    return torch.int8 if num_experts <= 2**7 else torch.int16


def move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor without waiting for the device: from pageable memory a copy would wait for what was launched."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
