"""One forward over one batch, and what each router of the model has to do in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreroute.adapters.hf.batch import Batch
from foreroute.adapters.hf.selection_mode import SelectionMode
from foreroute.errors import ReplayError
from foreroute.replay import LayerNotes, PassNotes, ReplayRows, Watch
from foreroute.trace import RoutingSpec


@dataclass(frozen=True)
class LayerPass:
    """What one router does in one pass.

    Attributes:
        rows: the routes to force, those of this router alone, or None where it chooses itself.
        notes: where it writes down what it did, or None where nobody wants to know.
        calls_1: int32 [1], how often it has selected inside a compiled graph.
        num_slots: R, positions of the batch, padding included.
        top_k: K.
    """

    rows: ReplayRows | None
    notes: LayerNotes | None
    calls_1: Tensor
    num_slots: int
    top_k: int


@dataclass(frozen=True)
class PassInput:
    """What is fixed before a pass begins, and the same when a part of it is recomputed.

    Attributes:
        spec: of the model.
        rows: the routes to force, or None.
        num_slots: R.
        device: where the tokens are.
        watch: what to note.
    """

    spec: RoutingSpec
    rows: ReplayRows | None
    num_slots: int
    device: torch.device
    watch: Watch

    def open(self, *, recompute: bool = False) -> Pass:
        """A pass over this, with room for its notes."""
        num_layers = self.spec.num_layers
        calls_L = torch.zeros(num_layers, dtype=torch.int32, device=self.device)
        notes = PassNotes.empty(self.watch, self.num_slots, self.spec, self.device)
        layers = []
        for layer in range(num_layers):
            rows = self.rows
            if rows is not None:
                ids_LRK, weights_LRK = rows.ids_LRK[layer : layer + 1], rows.weights_LRK
                if weights_LRK is not None:
                    weights_LRK = weights_LRK[layer : layer + 1]
                rows = replace(rows, ids_LRK=ids_LRK, weights_LRK=weights_LRK, ask_all=self.watch.own)
            layer_notes = None if self.watch.nothing else notes.layer(layer)
            calls_1 = calls_L[layer : layer + 1]
            layers.append(LayerPass(rows, layer_notes, calls_1, self.num_slots, self.spec.top_k))
        return Pass(self, layers, notes, [0] * num_layers, calls_L, torch.is_grad_enabled(), recompute)


@dataclass(eq=False)
class Pass:
    """One forward over one batch, or the recomputation of a part of it.

    Attributes:
        input: what it runs on.
        layers: what each router does.
        notes: what they note.
        calls: how often each router has selected, outside compiled graphs.
        calls_L: int32 [L], the same inside them, on the device.
        with_grad: whether gradients were recorded when it began.
        recompute: whether this is a recomputation in backward, whose notes and counts nobody reads.
    """

    input: PassInput
    layers: list[LayerPass]
    notes: PassNotes
    calls: list[int]
    calls_L: Tensor
    with_grad: bool
    recompute: bool


@dataclass(eq=False)
class Seat:
    """One router.

    Attributes:
        path: dotted name inside the model.
        layer: its position on the layer axis.
        mode: what watches its selection.
        final: which top-k of its forward is its selection.
        regroups: whether it hands its picks on in another order than that of tokens.
        now: what it does in the pass on top; None outside of any.
    """

    path: str
    layer: int
    mode: type[SelectionMode]
    final: int
    regroups: bool = False
    now: LayerPass | None = None


def require_each_router_once(seats: list[Seat], calls: list[int], in_graph_L: Tensor) -> None:
    """Raise `ReplayError` naming the first router that did not select exactly once.

    The device is waited for only if a router ran in a compiled graph.
    """
    if all(count == 1 for count in calls):
        return
    for seat, outside, inside in zip(seats, calls, in_graph_L.tolist(), strict=True):
        count = outside + inside
        if count != 1:
            why = "its rows would be consumed twice" if count else "a fused kernel or another branch bypassed it"
            raise ReplayError(
                f"router {seat.path} selected {count} times in one forward, expected once: {why}. "
                "Its routes cannot be recorded or replayed in this configuration"
            )


def require_no_capture(what: str) -> None:
    """Raise `ReplayError` if a CUDA graph is being captured.

    It would keep the addresses of the rows and notes of this pass, and use them again, whatever session is open then.

    Args:
        what: runs now.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ReplayError(
            f"{what} runs in a session while a CUDA graph is captured: the graph would go on with the routes of this "
            "pass in every later one. Capture outside of sessions, and run the model without the graph in them; or use "
            'torch.compile(mode="reduce-overhead"), which takes new routes for every pass'
        )


class Listener:
    """What a session wants to know and to decide. The default does nothing.

    Attributes:
        watch: what its passes note.
        forces: whether `begin` gives routes.
        counts_executed: whether losses after the trunk are to count the executed selection.
    """

    watch = Watch()
    forces = False
    counts_executed = False

    def begin(self, batch: Batch) -> ReplayRows | None:
        """A pass over `batch` begins. Returns the routes to force on it, or None."""
        return None

    def end(self, batch: Batch, notes: PassNotes) -> None:
        """The pass is over and every router selected once in it."""
