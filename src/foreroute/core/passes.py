"""A pass: one forward of a stack of layers, and what its routers do in it, as tensors on its device.

Only the selection is replaced. A router computes scores, selects K experts, and turns the scores of the selected ones
into gate weights. Whatever its own rule is, it is evaluated at the forced experts, on live scores, with live gradients:

    g_i = exp(s_i) / sum_{j in I} exp(s_j)   for i in the replayed set I, else 0

for the softmax family (Rollout Routing Replay, arXiv 2510.11370, section 4.1).

Absence is data: an id of -1 stands for a row that has no route. So the host knows nothing of which rows these are, and
nothing here waits for the device. What routers pick by themselves is kept, and a recomputation runs the same experts as
the forward in rows without a route too.

Letters: L routers in forward order, R rows of the batch as they see them, K picks, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import ReplayError
from .selection import LayerPass, Scores


@dataclass(frozen=True)
class Rows:
    """Routes of a flattened batch, made once on the device and replayed as often as wanted.

    Attributes:
        ids_LRK: signed integers [L, R, K], the experts to run; -1 where the router chooses.
    """

    ids_LRK: Tensor


class Watch(NamedTuple):
    """What a session wants of passes, beside what routers picked by themselves.

    Attributes:
        routes: whether it gives the routes to force.
        scores: of their picks, and the best score that they left out.
        others: what other modules that select handed on. Not in a compiled graph.
        caches: whether key-value caches hold the same rows from forward to forward. Not in a compiled graph.
    """

    routes: bool = False
    scores: bool = False
    others: bool = False
    caches: bool = False


class Pass:
    """One forward over one batch.

    Args:
        routers: path and number of picks of each of the L routers.
        num_rows: R.
        id_dtype: of ids that are kept.
        device: of the batch.
        rows: the routes to force, or None.
        watch: what to keep.
        num_others: how many other modules select in it.

    Attributes:
        own_LRK: [L, R, K], what routers picked by themselves; -1 where they have not selected, or have fewer picks.
        scores: what they selected by; None where that is not watched.
        calls: how often each router, and each other module, has selected outside of compiled graphs.
        calls_L: int32, the same inside of them, on the device.
        num_expected: how many of these must select, each once: routers, and others where their choices matter.
        others: for each other module, what it does in the pass, and in its recomputation.
        kept: what other modules handed on, by their number.
        with_grad: whether gradients were recorded when it began.
        last_layer: of the router that ran last, outside of compiled graphs; -1 before the first.
    """

    def __init__(
        self,
        routers: Sequence[tuple[str, int]],
        num_rows: int,
        id_dtype: torch.dtype,
        device: torch.device,
        rows: Rows | None,
        watch: Watch,
        num_others: int = 0,
    ) -> None:
        num_layers = len(routers)
        shape = num_layers, num_rows, max(map(itemgetter(1), routers))
        if rows is not None and rows.ids_LRK.shape != shape:
            raise ReplayError(
                f"the routes are {list(rows.ids_LRK.shape)} [L, R, K], the routers select {list(shape)}; a router that "
                "sees only part of the batch cannot be replayed"
            )
        self.rows = rows
        self.watch = watch
        self.own_LRK = torch.full(shape, -1, dtype=id_dtype, device=device)
        self.scores: Scores | None = None
        if watch.scores:
            picked = torch.empty(shape, device=device)
            if any(picks < shape[-1] for _, picks in routers):
                picked.fill_(torch.inf)  # behind the picks of a router, where none is the least
            self.scores = Scores(
                picked,
                torch.empty(shape[:2], device=device),
                torch.zeros(num_layers, dtype=torch.bool, device=device),
            )
        self.calls = [0] * (num_layers + num_others)
        self.calls_L = torch.zeros(num_layers + num_others, dtype=torch.int32, device=device)
        self.num_expected = num_layers
        self.others: Sequence[tuple[Any, Any]] = ()
        self.kept: dict[int, Tensor] = {}
        self.with_grad = torch.is_grad_enabled()
        self.last_layer = -1
        self._routers = routers
        self._parts: dict[bool, list[Any]] = {}

    @property
    def executed_LRK(self) -> Tensor:
        """[L, R, K], the experts that ran."""
        if self.rows is None:
            return self.own_LRK
        return torch.where(self.rows.ids_LRK < 0, self.own_LRK, self.rows.ids_LRK)

    def parts(self, *, again: bool = False) -> list[Any]:
        """What each router does, and then each other module, now or in a recomputation."""
        if again in self._parts:
            return self._parts[again]
        rows, scores, num_layers = self.rows, self.scores, len(self._routers)
        nothing = torch.full_like(self.own_LRK[0], -1)  # for the forward to find, and for a recomputation to write to
        own, none = self.own_LRK.unbind(), [nothing] * num_layers
        absent: list[Any] = [None] * num_layers
        picks = (
            none if again else own,
            own if again else none,
            absent if rows is None else rows.ids_LRK.unbind(),
        )
        calls, parts = self.calls_L.split(1), []
        for layer, (path, top_k) in enumerate(self._routers):
            of_layer: list[Any] = []
            for each in picks:
                part = each[layer]
                of_layer.append(part if part is None or top_k == nothing.shape[-1] else part[:, :top_k])
            kept = None
            if scores is not None:
                kept = Scores(scores.picked[layer][:, :top_k], scores.next[layer], scores.by_probability[layer])
            parts.append(LayerPass(path, layer, again, calls[layer], rows, *of_layer, kept))
        self._parts[again] = [*parts, *map(itemgetter(again), self.others)]
        return self._parts[again]


ADVICE = (
    "One model is recorded and replayed by one thread at a time: run it in the thread that opened the session, close "
    "the session first, or give each thread a copy of the model"
)


class OneThread:
    """Belongs to a thread while it is held, which that thread may do several times over.

    Args:
        held_for: what the holder does, for messages.

    Attributes:
        number: of the thread; None while nobody holds it.
    """

    def __init__(self, held_for: str) -> None:
        self._held_for = held_for
        self._lock = threading.RLock()  # a session may be collected, and so closed, at any moment
        self._times = 0
        self.number: int | None = None
        self._name = ""

    def __getstate__(self) -> str:
        """What it is held for: nobody holds a copy."""
        return self._held_for

    def __setstate__(self, held_for: str) -> None:
        OneThread.__init__(self, held_for)

    @contextmanager
    def held(self, doing: str) -> Iterator[None]:
        """Hold it while the context is open, which may be closed in any thread.

        Args:
            doing: what this thread is about to do, for the message.

        Raises:
            ReplayError: when another thread holds it.
        """
        with self._lock:
            self.require_mine(doing)
            self._times += 1
            self.number, self._name = threading.get_ident(), threading.current_thread().name
        try:
            yield
        finally:
            with self._lock:
                self._times -= 1
                if not self._times:
                    self.number = None

    def require_mine(self, doing: str) -> None:
        """Raise `ReplayError` if another thread holds it."""
        # Read once: another thread may let go at any moment, and no lock is taken on the way of every router.
        number = self.number
        if number is not None and number != threading.get_ident():
            raise ReplayError(
                f"thread {threading.current_thread().name!r} {doing}, while thread {self._name!r} {self._held_for}. "
                f"{ADVICE}"
            )


class PassStack:
    """Passes, the last to begin on top. False when empty.

    Args:
        hooks: whose `now` is their part of the pass on top, or None: routers, then other modules that select.

    Attributes:
        top: the pass that decides; None outside of any.
        is_again: whether what runs now is a recomputation of a part of it.
        thread: that is in the middle of a pass.
    """

    def __init__(self, hooks: Sequence[Any]) -> None:
        self.top: Any = None
        self.is_again = False
        self.thread = OneThread("is in the middle of a forward or a recomputation of it")
        self._hooks = hooks

    def __bool__(self) -> bool:
        return self.top is not None

    @contextmanager
    def on_top(self, current: Pass, *, again: bool = False) -> Iterator[None]:
        """Let this pass decide until the end of the block.

        Raises:
            ReplayError: while another thread is in the middle of a pass.
        """
        # a graph is traced in the thread that runs it, and holds no locks
        with nullcontext() if torch.compiler.is_compiling() else self.thread.held("runs a model"):
            before = self.top, self.is_again
            self._arm(current, again)
            try:
                yield
            finally:
                self._arm(*before)

    def _arm(self, current: Pass | None, again: bool) -> None:
        self.top, self.is_again = current, again
        parts = [None] * len(self._hooks) if current is None else current.parts(again=again)
        for hook, part in zip(self._hooks, parts, strict=True):
            hook.now = part


class ForwardArgs(Protocol):
    """What the arguments of one forward say about its batch. Every framework has its own."""

    @property
    def num_slots(self) -> int:
        """R, rows of the batch that routers see, padding included."""

    @property
    def device(self) -> torch.device:
        """Where the model takes them."""


class Listener:
    """What a session wants to know and to decide. The default does nothing.

    Attributes:
        watch: what its passes keep.
    """

    watch = Watch()

    def begin(self, chunk: int, args: Any) -> Rows | None:
        """A pass of a chunk begins. Returns the routes to force on it, or None."""
        return None

    def end(self, chunk: int, args: Any, current: Pass | None) -> None:
        """The pass is over, and every router of the chunk selected once in it; None of a chunk without routers."""


_before_step: set[LateChecks] = set()
"""Those that the next step of any optimizer waits for."""


@cache  # the hook stays: torch walks through its hooks while it calls them
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_wait_before_step)


def _wait_before_step(*_: object) -> None:
    for checks in list(_before_step):
        checks.wait()


class LateChecks:
    """What a device is asked about the batches of a session, or of a whole step, and the host looks at later.

    A batch that is on a GPU is compared with its routes there. Whoever read the answer at once would wait for all that
    was launched before it. So the host goes on, and looks when the session ends, or before weights change. There is
    nothing to wait for on the CPU, where it looks at once.
    """

    def __init__(self) -> None:
        self._wrong: Tensor | None = None
        self._answer: tuple[Tensor, torch.cuda.Event] | None = None
        self._tells: list[Callable[[], object]] = []

    def add(self, wrong: Tensor, tell: Callable[[], object]) -> None:
        """Ask whether a batch is wrong. Earlier answers are looked at if they are there.

        Args:
            wrong: bool [], on the device.
            tell: compares the batch on the host, and raises what is wrong with it.

        Raises:
            Exception: what `tell` raises, for an earlier batch.
        """
        if wrong.device.type == "cpu":
            _require_right(wrong, [tell])
            return
        self.look()
        self._wrong = wrong if self._wrong is None else self._wrong | wrong
        self._tells.append(tell)
        if wrong.is_cuda:
            self._answer = self._wrong.to("cpu", non_blocking=True), torch.cuda.Event()
            self._answer[1].record()
        _watch_optimizers()
        _before_step.add(self)

    def close(self) -> None:
        """Leave the wait to the next step of any optimizer of torch, where gradients are recorded. Raises as `add`."""
        if torch.is_grad_enabled():
            self.look()
        else:
            self.wait()

    def wait(self) -> None:
        """Look at every answer, for which the device must have begun the last pass. Raises as `add`."""
        wrong, answer, tells = self._wrong, self._answer, self._tells
        self._wrong, self._answer, self._tells = None, None, []
        _before_step.discard(self)
        if answer is not None:
            wrong, brought = answer
            brought.synchronize()
        if wrong is not None:
            _require_right(wrong, tells)

    def look(self) -> None:
        """Look at the answers if a GPU has given them. Raises as `add`."""
        if self._answer is not None and self._answer[1].query():
            self.wait()


def _require_right(wrong: Tensor, tells: Sequence[Callable[[], object]]) -> None:
    if wrong.item():
        for tell in tells:
            tell()
        raise AssertionError("the device finds a batch wrong that the host finds right")


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
