"""One forward of a chunk over one micro-batch, and what each of its routers has to do in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foreroute.adapters.megatron.call import Call
from foreroute.adapters.recomputation import saves_for_checkpoint
from foreroute.errors import ReplayError
from foreroute.replay import Counts, LayerNotes, PassNotes, ReplayRows, Watch
from foreroute.trace import RoutingSpec

OWN_CHECKPOINTS = (
    "its recomputation cannot be told which routes to use. Use Megatron's own activation recomputation "
    "(recompute_granularity)"
)


@dataclass(frozen=True)
class Orders:
    """What is to be forced on one pass.

    Attributes:
        rows: the routes, layers of the chunk alone.
        is_padded: whether some rank sees padding, so that all of them must leave it out of their statistics alike.
        counts: which selection auxiliary losses and expert-bias counters count.
    """

    rows: ReplayRows
    is_padded: bool
    counts: Counts


@dataclass(frozen=True)
class LayerPass:
    """What one router does in one pass.

    Attributes:
        rows: the routes to force, or None where it chooses itself.
        notes: where it writes down what it did, or None where nobody wants to know.
        padding_R: bool [R], True for padding, or None where there is none, or nothing is forced.
        counts: as in `Orders`.
        index: which layer of the rows is its own.
    """

    rows: ReplayRows | None
    notes: LayerNotes | None
    padding_R: Tensor | None
    counts: Counts
    index: int = 0


@dataclass(frozen=True)
class PassInput:
    """What is fixed before a pass begins, and the same when a part of it is recomputed.

    Attributes:
        spec: of the chunk.
        orders: what to force, or None.
        num_slots: R, rows that its routers see.
        device: where the model is.
        watch: what to note.
    """

    spec: RoutingSpec
    orders: Orders | None
    num_slots: int
    device: torch.device
    watch: Watch

    def open(self, *, recompute: bool = False) -> Pass:
        """A pass over this, with room for its notes; a recomputation notes nothing."""
        watch = Watch() if recompute else self.watch
        notes = PassNotes.empty(watch, self.num_slots, self.spec, self.device)
        layers = self._recomputed if recompute else self._layers(watch, notes)
        return Pass(self, layers, notes, [0] * len(layers), torch.is_grad_enabled())

    @cached_property
    def _recomputed(self) -> list[LayerPass]:
        """The same for every recomputed part, of which there may be one for each layer."""
        return self._layers(Watch(), None)

    def _layers(self, watch: Watch, notes: PassNotes | None) -> list[LayerPass]:
        own_notes = [None if watch.nothing or notes is None else notes.layer(i) for i in range(self.spec.num_layers)]
        if self.orders is None:
            return [LayerPass(None, own, None, "native") for own in own_notes]
        rows, counts = self.orders.rows, self.orders.counts
        padding_R = ~rows.real_R if self.orders.is_padded else None
        rows = replace(rows, ask_all=watch.own or rows.ask_all)
        return [LayerPass(rows, own, padding_R, counts, index) for index, own in enumerate(own_notes)]


@dataclass(eq=False)
class Pass:
    """One forward over one micro-batch, or the recomputation of a part of it.

    Attributes:
        input: what it runs on.
        layers: what each router does.
        notes: what they note.
        calls: how often each router has selected.
        with_grad: whether gradients were recorded when it began.
        is_checkpointed: whether some router will run again in backward.
    """

    input: PassInput
    layers: list[LayerPass]
    notes: PassNotes
    calls: list[int]
    with_grad: bool
    is_checkpointed: bool = False

    def note_call(self, position: int, path: str) -> None:
        """A router selected. Without gradients in a pass with gradients it does so in a reentrant checkpoint.

        Raises:
            ReplayError: in a checkpoint whose recomputation cannot be told which routes to use.
        """
        if saves_for_checkpoint():
            raise ReplayError(f"{path} runs inside a non-reentrant torch.utils.checkpoint; {OWN_CHECKPOINTS}")
        self.calls[position] += 1
        self.is_checkpointed = self.is_checkpointed or (self.with_grad and not torch.is_grad_enabled())


class Listener:
    """What a session wants to know and to decide. The default does nothing.

    Attributes:
        watch: what its passes note.
    """

    watch = Watch()

    def begin(self, chunk: int, call: Call, device: torch.device) -> Orders | None:
        """A pass of a chunk begins. Returns what to force on it, or None."""
        return None

    def end(self, chunk: int, call: Call, notes: PassNotes) -> None:
        """The pass is over and every router of the chunk selected once in it."""


def require_each_router_once(paths: list[str], calls: list[int]) -> None:
    """Raise `ReplayError` naming the first router that did not select exactly once."""
    for path, count in zip(paths, calls, strict=True):
        if count != 1:
            why = "its rows would be consumed twice" if count else "another branch or a captured graph bypassed it"
            raise ReplayError(
                f"router {path} selected {count} times in one forward, expected once: {why}. "
                "Its routes cannot be recorded or replayed in this configuration"
            )


def slots_of(trunk: Any, call: Call, sequence_ranks: int) -> int:
    """R, the rows that routers of this chunk see in this call."""
    is_first = getattr(trunk, "pre_process", True)
    hidden = call.embedded if is_first else trunk.decoder.input_tensor
    if hidden is None and is_first and call.input_ids is not None:
        return call.input_ids.numel() // sequence_ranks
    if isinstance(hidden, Tensor):
        return hidden.shape[0] * hidden.shape[1]
    raise ReplayError("a forward of the model was given neither tokens, nor embeddings, nor what the stage before made")
