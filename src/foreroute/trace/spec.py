"""Facts of the model that a trace was recorded from: experts, picks and routed layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.checks import MOST_INT32, whole_number
from foreroute.errors import SpecMismatchError, TraceContentError, shown

MAX_EXPERTS, MAX_LAYERS = 1 << 16, 1 << 10
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 20
"""Counts hold a number for each expert of each layer. The largest models have about 2^15 of them."""
ID_TYPES = np.dtype(np.uint8), np.dtype(np.uint16)
"""Types of expert ids. Loops are compiled for each."""


class LayerKind(StrEnum):
    """Part of a model that a routed layer belongs to. Each kind numbers its layers on its own.

    A decoder layer whose attention block routes too has two rows, ATTENTION and DECODER, of the same number.
    """

    DECODER = "decoder"
    ATTENTION = "attention"
    MTP = "mtp"
    DRAFT = "draft"
    HASH = "hash"


@dataclass(frozen=True, order=True)
class RoutedLayer:
    """One row of the layer axis: the layer's number in the model (dense layers count) and its kind."""

    index: int
    kind: LayerKind = LayerKind.DECODER

    def __post_init__(self) -> None:
        index = whole_number(self.index, name="the number of a routed layer", least=0, most=MOST_INT32)
        object.__setattr__(self, "index", index)
        if not isinstance(self.kind, LayerKind):
            raise TraceContentError(
                f"layer {self.index} is of kind {shown(self.kind)}; expected one of {', '.join(LayerKind)}"
            )

    @property
    def noun(self) -> str:
        """Name of such a layer in messages and axes, without its number."""
        return str(self.kind)

    def __str__(self) -> str:
        return f"{self.noun} {self.index}"


class LayersOfOneSize(NamedTuple):
    """Layers of a model that have the same E and K, and where they are on the layer axis: all of it, or int64 [L']."""

    num_experts: int
    top_k: int
    at: slice | NDArray[np.int64]


@dataclass(frozen=True)
class RoutingSpec:
    """The routing facts of a model: E experts, K picks per token, and its routed layers in order.

    Layers may differ in E and K (`of_sizes`). Arrays then have the K of the layer with most, and `filler` in the
    columns that another layer does not have.

    Attributes:
        num_experts: E, the logical experts in each routed layer; the largest, where layers differ.
        top_k: K, how many of them a token is sent to; the largest, where layers differ.
        layers: the L routed layers, 1,024 at most, with L times E at most 2^20. Dense layers have no entry.
        model: the model's name, for messages. It does not take part in `require_same`.
        sizes: (E, K) of each layer, where they differ; empty where all are (`num_experts`, `top_k`).
        num_layers: L, the number of routed layers.
        id_dtype: uint8 up to 256 experts, or 255 where layers differ in K; else uint16.
        sizes_L: (E, K) of each of L layers, whether they differ or not.
        picks_L: int64 [L], the K of each layer.
        layers_by_size: the layers of each size, so that each part [..., `at`, :K] of routes is one without a filler.
    """

    num_experts: int
    top_k: int
    layers: tuple[RoutedLayer, ...]
    model: str = ""
    sizes: tuple[tuple[int, int], ...] = ()
    num_layers: int = field(init=False, repr=False, compare=False)
    id_dtype: np.dtype[np.uint8] | np.dtype[np.uint16] = field(init=False, repr=False, compare=False)
    sizes_L: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    picks_L: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    layers_by_size: tuple[LayersOfOneSize, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_experts", whole_number(self.num_experts, name="num_experts", most=MAX_EXPERTS))
        object.__setattr__(self, "top_k", whole_number(self.top_k, name="top_k", most=self.num_experts))
        object.__setattr__(self, "layers", as_layers(self.layers))
        if not self.layers:
            raise TraceContentError("the layer table is empty; a routed model has at least one routed layer")
        count = len(self.layers)
        if count > MAX_LAYERS or count * self.num_experts > MAX_EXPERTS_OF_ALL_LAYERS:
            raise TraceContentError(
                f"there are {count} layers of {self.num_experts} experts; expected {MAX_LAYERS} layers and "
                f"{MAX_EXPERTS_OF_ALL_LAYERS} experts in all of them at most"
            )
        if len(set(self.layers)) != len(self.layers):
            names = ", ".join(map(str, self.layers))
            raise TraceContentError(f"the layer table names a layer twice: {names}")
        object.__setattr__(self, "num_layers", count)
        object.__setattr__(self, "sizes", self._checked_sizes())
        ids = self.num_experts + (len({top_k for _, top_k in self.sizes}) > 1)  # one more, for the filler
        if ids > MAX_EXPERTS:
            raise TraceContentError(
                f"layers differ in K, and one has {self.num_experts} experts; expected {MAX_EXPERTS - 1} at most"
            )
        object.__setattr__(self, "id_dtype", np.dtype(np.uint8 if ids <= 256 else np.uint16))
        sizes_L = self.sizes or ((self.num_experts, self.top_k),) * count
        object.__setattr__(self, "sizes_L", sizes_L)
        object.__setattr__(self, "picks_L", np.array([top_k for _, top_k in sizes_L]))
        parts = [LayersOfOneSize(self.num_experts, self.top_k, slice(None))]
        if self.sizes:
            table = np.array(self.sizes)
            parts = [LayersOfOneSize(*size, np.flatnonzero((table == size).all(1))) for size in dict.fromkeys(sizes_L)]
        object.__setattr__(self, "layers_by_size", tuple(parts))

    def _checked_sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the sizes of layers, if they differ, as whole numbers."""
        checked = []
        for num_experts, top_k in self.sizes:
            experts = whole_number(num_experts, name="num_experts of a layer", most=self.num_experts)
            checked.append((experts, whole_number(top_k, name="top_k of a layer", most=min(experts, self.top_k))))
        if not checked:
            return ()
        most = tuple(map(max, zip(*checked, strict=True)))
        if len(checked) != len(self.layers) or most != (self.num_experts, self.top_k):
            raise TraceContentError(
                f"there are sizes of {len(checked)} layers, up to {most}; expected (experts, picks) of each of "
                f"{len(self.layers)} layers, up to {(self.num_experts, self.top_k)}"
            )
        return () if len(set(checked)) == 1 else tuple(checked)

    @classmethod
    def of_sizes(cls, layers: Iterable[RoutedLayer], sizes: Iterable[tuple[int, int]], model: str = "") -> RoutingSpec:
        """Make the facts of a model from the (E, K) of each of its layers."""
        table, each = as_layers(layers), tuple(sizes)
        num_experts, top_k = map(max, zip(*each, strict=True)) if each else (1, 1)  # without a layer, it is refused
        return cls(num_experts, top_k, table, model, each)

    @property
    def filler(self) -> int:
        """The highest number of `id_dtype`, -1 in a type with a sign: it fills columns of a layer with fewer picks."""
        return int(np.iinfo(self.id_dtype).max)

    @cached_property
    def is_pick_LK(self) -> NDArray[np.bool_]:
        """Bool [L, K], the columns that a layer has; False where it has a filler."""
        return np.asarray(np.arange(self.top_k) < self.picks_L[:, None])

    @property
    def routing(self) -> str:
        """The sizes for a reader: "top-4 of 64", or "top-1 to 4 of 64" where layers differ."""
        each = zip(*self.sizes_L, strict=True)
        experts, picks = ([*dict.fromkeys((min(numbers), max(numbers)))] for numbers in each)
        return f"top-{' to '.join(map(str, picks))} of {' to '.join(map(str, experts))}"

    def __repr__(self) -> str:
        ends = f"{self.layers[0]} to {self.layers[-1]}" if len(self.layers) > 1 else f"{self.layers[0]}"
        return f"RoutingSpec({self.model or 'model not stated'}, {self.num_layers} layers ({ends}), {self.routing})"

    def require_alike(self, what: str, advice: str = "take those of one size by trace.select_layers") -> None:
        """Raise `SpecMismatchError`, with `advice`, unless all layers have the E and K that `what` stands on."""
        if self.sizes:
            raise SpecMismatchError(
                f"{what} cannot take layers of different sizes, and this model has {self.routing} experts; {advice}"
            )

    def select(self, layers: Iterable[RoutedLayer]) -> RoutingSpec:
        """Return the facts of some of the layers, in the given order."""
        chosen = as_layers(layers)
        at = self.positions(chosen)
        if not self.sizes:
            return replace(self, layers=chosen)
        return RoutingSpec.of_sizes(chosen, [self.sizes[i] for i in at.tolist()], self.model)

    def positions(self, layers: Iterable[RoutedLayer]) -> NDArray[np.int64]:
        """Return where the given layers are on the layer axis, int64 [L'].

        Raises:
            SpecMismatchError: when a layer is not in the table.
        """
        # by name and never by number: a part of a model keeps the names of its layers, and not their numbers
        index = {layer: i for i, layer in enumerate(self.layers)}
        chosen = as_layers(layers)
        if missing := [str(layer) for layer in chosen if layer not in index]:
            raise SpecMismatchError(
                f"there are no routes of {', '.join(missing)}; the routed layers are {_names(self)}. Take layers of "
                "this table, or the trace that has them"
            )
        return np.array([index[layer] for layer in chosen], np.int64)

    def require_same(self, other: RoutingSpec, *, what: str) -> None:
        """Raise `SpecMismatchError` unless `other`, which `what` names, has the same experts, picks and layer table."""
        differences = []
        if other.num_experts != self.num_experts:
            differences.append(f"{other.num_experts} experts instead of {self.num_experts}")
        if other.top_k != self.top_k:
            differences.append(f"top-{other.top_k} instead of top-{self.top_k}")
        if other.layers != self.layers:
            differences.append(f"routed layers [{_names(other)}] instead of [{_names(self)}]")
        if not differences and other.sizes != self.sizes:
            differences.append(f"other experts or picks in some layers ({other.routing})")
        if differences:
            raise SpecMismatchError(
                f"{what} belongs to another model: it has {', '.join(differences)}. "
                f"Expected the routing of {self.model or 'this model'}; use the trace that was recorded for it."
            )


def layers_from(entries: Any) -> tuple[RoutedLayer, ...]:
    """Make a layer table from what a file has: a list of [number, kind]."""
    # counted before anything is made of them
    if not isinstance(entries, list) or len(entries) > MAX_LAYERS:
        raise TraceContentError(f"the layer table is {shown(entries)}; expected a list of {MAX_LAYERS} layers at most")
    kinds = [kind.value for kind in LayerKind]
    for entry in entries:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str) and entry[1] in kinds):
            raise TraceContentError(
                f"a layer is {shown(entry)}; expected [number, kind] with one of {', '.join(kinds)}"
            )
    return tuple(RoutedLayer(number, LayerKind(kind)) for number, kind in entries)


def spec_from(table: Any, model: str) -> RoutingSpec:
    """Make the facts of a model from what a trace file has: a list of [number, kind, experts, picks]."""
    if not isinstance(table, list) or not all(isinstance(entry, list) and len(entry) == 4 for entry in table):
        raise TraceContentError(f"the layer table is {shown(table)}; expected a list of [number, kind, experts, picks]")
    layers = layers_from([entry[:2] for entry in table])
    for entry in table:
        whole_number(entry[2], name="num_experts", most=MAX_EXPERTS)
        whole_number(entry[3], name="top_k", most=MAX_EXPERTS)
    return RoutingSpec.of_sizes(layers, [(entry[2], entry[3]) for entry in table], model)


def as_layers(layers: object) -> tuple[RoutedLayer, ...]:
    """Return routed layers as a table, and refuse anything else."""
    table = tuple(layers) if isinstance(layers, Iterable) else None
    if table is None or not all(isinstance(layer, RoutedLayer) for layer in table):
        raise TraceContentError(
            f"the layers are {shown(layers)}; expected routed layers, such as [RoutedLayer(0), RoutedLayer(1)]"
        )
    return table


def _names(spec: RoutingSpec) -> str:
    return ", ".join(map(str, spec.layers))
