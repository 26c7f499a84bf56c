"""A pass: one forward of a model, or of its pipeline chunk, over one batch, or the recomputation of a part of it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from foreroute.core.overrides import overridden
from foreroute.errors import ReplayError
from foreroute.replay.indexers import IndexerPass
from foreroute.replay.rows import ReplayRows
from foreroute.replay.selection import LayerPass, PassObservation, Watch
from foreroute.trace import RoutingSpec

Now = TypeVar("Now", LayerPass, IndexerPass)


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
        watch: what its passes observe.
        forces: whether `begin` gives routes.
        counts_executed: whether losses after the routers are to count the executed selection.
    """

    watch = Watch()
    forces = False
    counts_executed = False

    def begin(self, chunk: int, args: Any) -> ReplayRows | None:
        """A pass of a chunk begins. Returns the routes to force on it, or None."""
        return None

    def end(self, chunk: int, args: Any, observed: PassObservation | None) -> None:
        """The pass is over, and every router of the chunk selected once in it; None of a chunk without routers."""


class SelectionHook(ABC, Generic[Now]):
    """One module of a chunk that selects. A framework says how its selection is forced or watched.

    Args:
        path: dotted name inside the chunk.
        selecting: the module and the name of its method in which the selection is made.

    Attributes:
        noun: what it is, for messages.
        now: what it does in the pass on top; None outside of any.
    """

    noun: ClassVar[str]

    def __init__(self, path: str, selecting: tuple[nn.Module, str]) -> None:
        self.path = path
        self.selecting = selecting
        self.now: Now | None = None
        self._installed = ExitStack()

    def install(self, run: Callable[..., Any]) -> None:
        """Have `run(method, ...)` called in the place of the method, until `remove`."""
        self._installed.enter_context(overridden(*self.selecting, run))

    def remove(self) -> None:
        """Restore what was there; what somebody replaced meanwhile stays theirs."""
        self._installed.close()

    @abstractmethod
    def select(self, now: Now, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the module, its selection forced and observed as `now` says."""


class RouterHook(SelectionHook[LayerPass]):
    """A router, whose `select` uses `now.force` and `now.observe`."""

    noun = "router"


class IndexerHook(SelectionHook[IndexerPass]):
    """An indexer of sparse attention, whose `select` hands on `now.rows` and notes it in `now.observed`."""

    noun = "indexer"


@dataclass(frozen=True)
class PassInput:
    """What is fixed before a pass begins, and the same when a part of it is recomputed.

    Attributes:
        spec: of the chunk.
        rows: the routes to force, or None.
        num_slots: R.
        device: where the model is.
        watch: what to observe.
        watch_again: what a recomputation observes, though nobody reads it: where it must do as the forward did.
        num_indexers: D.
    """

    spec: RoutingSpec
    rows: ReplayRows | None
    num_slots: int
    device: torch.device
    watch: Watch
    watch_again: Watch
    num_indexers: int = 0

    @property
    def heeds_indexers(self) -> bool:
        """Whether choices of indexers are observed or forced."""
        return self.watch.indexers or (self.rows is not None and self.rows.indexers is not None)

    def open(self) -> Pass:
        """A pass over this, with room for what is observed."""
        layers, observed, calls_L = self._room_for(self.watch)
        return Pass(self, layers, observed, [0] * len(layers), calls_L, torch.is_grad_enabled())

    def open_again(self) -> Pass:
        """The recomputation of a part of a pass over this. What it observes and counts is read by nobody."""
        layers, observed, calls_L = self._again
        return Pass(self, layers, observed, [0] * len(layers), calls_L, torch.is_grad_enabled(), is_recompute=True)

    @cached_property
    def _again(self) -> tuple[list[LayerPass | IndexerPass], PassObservation, Tensor]:
        """What is the same for every recomputed part, of which there may be one for each layer.

        No pass: it would refer to this in turn, and so keep the rows on the device until Python looks for cycles.
        """
        return self._room_for(self.watch_again)

    def _room_for(self, watch: Watch) -> tuple[list[LayerPass | IndexerPass], PassObservation, Tensor]:
        """What each router and indexer does, what they write down, and their calls in graphs."""
        num_layers = self.spec.num_layers
        calls_L = torch.zeros(num_layers + self.num_indexers, dtype=torch.int32, device=self.device)
        observed = PassObservation.empty(watch, self.num_slots, self.spec, self.device)
        rows = [None] * num_layers if self.rows is None else self.rows.by_layer()
        of_layers = [None] * num_layers if watch.nothing else observed.by_layer(num_layers)
        calls = calls_L.split(1)
        routers = [
            LayerPass(layer, rows[layer], of_layers[layer], calls_1, self.num_slots, self.spec.top_k, watch.own)
            for layer, calls_1 in enumerate(calls[:num_layers])
        ]
        chosen = None if self.rows is None else self.rows.indexers
        noted = observed.choices if watch.indexers else None
        indexers = [
            IndexerPass(num_layers + number, number, chosen, noted, calls_1)
            for number, calls_1 in enumerate(calls[num_layers:])
        ]
        return [*routers, *indexers], observed, calls_L


@dataclass(eq=False)
class Pass:
    """One forward over one batch, or the recomputation of a part of it.

    Attributes:
        input: what it runs on.
        layers: what each router does, and then each indexer.
        observed: what they write down.
        calls: how often each has selected, outside compiled graphs.
        calls_L: int32 [L + D], the same inside them, on the device.
        with_grad: whether gradients were recorded when it began.
        is_recompute: whether this is a recomputation in backward.
    """

    input: PassInput
    layers: list[LayerPass | IndexerPass]
    observed: PassObservation
    calls: list[int]
    calls_L: Tensor
    with_grad: bool
    is_recompute: bool = False


class PassStack:
    """Passes, the last to begin on top. Truth value: whether there is one.

    Args:
        selecting: whose `now` is their part of the pass on top, or None: routers, then indexers.
    """

    def __init__(self, selecting: Sequence[SelectionHook[Any]]) -> None:
        self._selecting = selecting
        self._passes: list[Pass] = []
        self._thread = OneThread("is in the middle of a forward or a recomputation of it")

    def __bool__(self) -> bool:
        return bool(self._passes)

    @property
    def top(self) -> Pass:
        """The pass that decides."""
        return self._passes[-1]

    @contextmanager
    def on_top(self, current: Pass) -> Iterator[None]:
        """Let this pass decide until the end of the block.

        Raises:
            ReplayError: while another thread is in the middle of a pass.
        """
        # a graph is traced in the thread that runs it, and holds no locks
        with nullcontext() if torch.compiler.is_compiling() else self._thread.held("runs a model"):
            self._passes.append(current)
            self._arm()
            try:
                yield
            finally:
                self._passes.pop()
                self._arm()

    def require_own_thread(self, path: str) -> None:
        """Raise `ReplayError` if the pass on top is another thread's, which runs this router or layer too."""
        self._thread.require_mine(f"runs {path} of a model")

    def _arm(self) -> None:
        layers = self._passes[-1].layers if self._passes else [None] * len(self._selecting)
        for hook, layer in zip(self._selecting, layers, strict=True):
            hook.now = layer


ADVICE = (
    "One model is recorded and replayed by one thread at a time: run it in the thread that opened the session, close "
    "the session first, or give each thread a copy of the model"
)


class OneThread:
    """Belongs to a thread while it is held, which that thread may do several times over.

    Args:
        held_for: what the holder does, for messages.
    """

    def __init__(self, held_for: str) -> None:
        self._held_for = held_for
        self._lock = threading.RLock()  # a session may be collected, and so closed, at any moment
        self._times = 0
        self._number: int | None = None
        self._name = ""

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
            self._number, self._name = threading.get_ident(), threading.current_thread().name
        try:
            yield
        finally:
            with self._lock:
                self._times -= 1
                if not self._times:
                    self._number = None

    def require_mine(self, doing: str) -> None:
        """Raise `ReplayError` if another thread holds it."""
        # Read once: another thread may let go at any moment, and no lock is taken on the way of every router.
        number = self._number
        if number is not None and number != threading.get_ident():
            raise ReplayError(
                f"thread {threading.current_thread().name!r} {doing}, while thread {self._name!r} {self._held_for}. "
                f"{ADVICE}"
            )


def require_each_once(hooks: Sequence[SelectionHook[Any]], calls: Sequence[int], in_graph_L: Tensor) -> None:
    """Raise `ReplayError` naming the first router or indexer that did not select exactly once.

    The device is waited for only if one ran in a compiled graph.
    """
    if all(count == 1 for count in calls):
        return
    for hook, outside, inside in zip(hooks, calls, in_graph_L.tolist(), strict=True):
        count = outside + inside
        if count != 1:
            why = (
                "its rows would be consumed twice"
                if count
                else "a fused kernel, a captured graph or another branch bypassed it"
            )
            raise ReplayError(
                f"{hook.noun} {hook.path} selected {count} times in one forward, expected once: {why}. "
                "Its choices cannot be recorded or replayed in this configuration"
            )
