"""The interface an adapter author implements for the checks: how to build, attach, run and look. Numpy only.

    class Mine(AdapterUnderTest):
        name = "my framework"
        def build(self, case): ...       # a small seeded model, behind `ModelUnderTest`
        def attach(self, model): ...     # the adapter itself: record() and replay()

The kit never looks into the framework. It sees what the author's own probe saw at the experts, which is why the probe
should read what the expert computation is *given*, and not what the adapter says it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.trace import IndexerSpec, RoutingSpec, RoutingTrace

Padding = Literal["none", "left", "right"]


class Unsupported(Exception):  # noqa: N818
    """Raised by an adapter under test for a case that its framework does not have; the message is the reason."""


class Fault(StrEnum):
    """A trap that the author can build into a model. Without it, the checks that need it do not apply."""

    FUSED_ROUTER = "a layer whose experts are selected by a path that bypasses its router module"
    ORPHAN_ROUTERS = "a second copy of the decoder layers, which never run, registered before the ones that do"
    MTP_HEAD = "a multi-token-prediction layer with a router, run after the decoder, whose layer number restarts at 0"
    FORWARD_RAISES = "an exception raised in the middle of the next forward, and only there"


@dataclass(frozen=True)
class Case:
    """A model to build. The same case gives the same weights, in a model of its own, each time.

    Attributes:
        checkpointing: activations are recomputed in backward.
        top_k: K instead of the family's own.
        num_experts: E instead of the family's own.
        selective: with `checkpointing`, but for the results of some operators, among them top-k, which are kept. Raise
            `Unsupported` where a framework has no such checkpoints.
        compiled: each layer is compiled, by any backend. Raise `Unsupported` where a framework compiles none.
    """

    checkpointing: bool = False
    top_k: int | None = None
    num_experts: int | None = None
    selective: bool = False
    compiled: bool = False


@dataclass(frozen=True, eq=False)
class Batch:
    """Whole sequences, to be laid out by the author as the framework likes.

    Attributes:
        sequences: S arrays of token ids, all of one length where `padding` is "none".
        padding: on which side shorter sequences are padded; there are at least two columns of padding then.
    """

    sequences: tuple[NDArray[np.int32], ...]
    padding: Padding = "none"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [S]."""
        return np.array([len(tokens) for tokens in self.sequences], np.int64)

    @property
    def width(self) -> int:
        """Columns of the padded batch."""
        return int(self.lengths.max()) + (0 if self.padding == "none" else 2)


@dataclass(frozen=True, eq=False)
class Seen:
    """Values that the probe saw in one forward. N real tokens, packed sequence after sequence in the batch's order.

    Attributes:
        ids_NLK: integers [N, L, K], the experts that each token was computed by, layers in order of execution.
        logprobs_R: [R], log-probability of every next token, R = N - S.
        loss: what `backward()` differentiates, minus the mean of `logprobs_R`.
        gates_NLK: [N, L, K], the weights that the experts' outputs are summed with, or None when not visible.
        padding_ids_PLK: integers [P, L, K], the experts of padding rows, or None when padding is not routed.
        other_ids: experts picked by routers that are not the decoder's (an MTP head), integers [rows, K] by name.
        chosen_NDU: bool [N, D, U · H], the units that indexers of sparse attention handed on to the attention, of those
            that each query sees; columns are ids as in `foreroute.trace.IndexerSpec`. None when not visible.
    """

    ids_NLK: NDArray[Any]
    logprobs_R: NDArray[Any]
    loss: float
    gates_NLK: NDArray[Any] | None = None
    padding_ids_PLK: NDArray[Any] | None = None
    other_ids: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    chosen_NDU: NDArray[np.bool_] | None = None


class Step(Protocol):
    """A forward that has run."""

    @property
    def seen(self) -> Seen:
        """Values that the probe saw."""

    def backward(self) -> None:
        """Differentiate the loss; gradients add up in the model."""


class ModelUnderTest(Protocol):
    """A small seeded model of the framework, with the author's probe."""

    @property
    def router_weights(self) -> Sequence[str]:
        """Names of the routers' weights in `gradients()`, in layer order."""

    def forward(self, batch: Batch, *, grad: bool = True) -> Step:
        """Run the model, with or without recording for backward."""

    def gradients(self) -> Mapping[str, NDArray[Any]]:
        """The gradients since the model was built."""

    def add_to(self, name: str, delta: NDArray[Any]) -> None:
        """Change a weight in place."""

    def inject(self, fault: Fault) -> None:
        """Build a trap in, before or after the adapter was attached.

        Raises:
            Unsupported: when this framework cannot have it, or the author has not built it.
        """


class RecordingUnderTest(Protocol):
    """Routes that a record session collects."""

    def trace(self) -> RoutingTrace:
        """Everything recorded so far."""


class AttachedModel(Protocol):
    """The adapter's own door, as `foreroute.adapters.hf.RoutedTransformer` has it."""

    @property
    def spec(self) -> RoutingSpec:
        """Experts, picks and layer table."""

    def record(self, *, weight_version: int = ...) -> AbstractContextManager[RecordingUnderTest]:
        """Record the routes of every forward."""

    def replay(self, trace: RoutingTrace, *, weight_version: int | None = ...) -> AbstractContextManager[Any]:
        """Force the routes of `trace`."""


@dataclass(frozen=True)
class GroupLimit:
    """Selection limited to groups: E experts in `count` groups of equal size, of which `live` take part."""

    count: int
    live: int


class AdapterUnderTest(Protocol):
    """An adapter and the models to check it on. Subclass it and implement `build` and `attach`.

    Attributes:
        name: for the report.
        vocabulary: token ids 1 .. vocabulary - 1 may be used.
        group_limit: the group limit of the router, or None.
        gradient_tolerance: relative difference allowed between gradients that should be the same; 0 for bit-equal.
        picks_in_order: whether the probe sees the picks of a row in the router's order; where experts are given a set,
            recordings are compared as sets.
        scores_on_sets: whether the adapter computes log-probabilities itself, so that sampling masks reach it.
    """

    name: str
    vocabulary: int = 32
    group_limit: GroupLimit | None = None
    gradient_tolerance: float = 0.0
    picks_in_order: bool = True
    scores_on_sets: bool = False

    def build(self, case: Case) -> ModelUnderTest:
        """A new model that no adapter has touched.

        Raises:
            Unsupported: when the framework has no such model.
        """

    def attach(self, model: ModelUnderTest) -> AttachedModel:
        """The adapter under test."""

    def indexers(self) -> IndexerSpec | None:
        """The facts of the family's indexers, where the adapter replays them; `record` takes `indexers=True` then.

        Sequences of 12 tokens must have more than `top_k` units.
        """
        return None

    def ingest(
        self, spec: RoutingSpec, token_ids: Sequence[ArrayLike], expert_ids: Sequence[ArrayLike]
    ) -> RoutingTrace:
        """Make a trace of routes from outside. Override it where the adapter has an entrance of its own."""
        return RoutingTrace.from_sequences(spec, token_ids, expert_ids)
