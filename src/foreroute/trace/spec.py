"""What a trace must know about the model that it was recorded from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError, SpecMismatchError, TraceContentError, shown

MAX_EXPERTS, MAX_LAYERS = 1 << 16, 1 << 10
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 20
"""Counts hold a number for each expert of each layer. The largest models have about 2^15 of them."""
MAX_LAYER_NUMBER = (1 << 31) - 1


class LayerKind(StrEnum):
    """Which part of a model a routed layer belongs to. Each kind numbers its layers on its own.

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
        if not is_whole(self.index) or not 0 <= self.index <= MAX_LAYER_NUMBER:
            raise TraceContentError(f"a routed layer has number {self.index!r:.40}; expected 0 to {MAX_LAYER_NUMBER}")
        object.__setattr__(self, "index", int(self.index))
        if not isinstance(self.kind, LayerKind):
            raise TraceContentError(
                f"layer {self.index} is of kind {self.kind!r:.40}; expected one of {', '.join(LayerKind)}"
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


@dataclass(frozen=True)
class RoutingSpec:
    """The routing facts of a model: E experts, K picks per token, and its routed layers in order.

    Attributes:
        num_experts: E, the number of logical experts in each routed layer.
        top_k: K, how many of them a token is sent to.
        layers: the L routed layers, 1,024 at most, with 2^20 experts in all. Dense layers have no entry.
        model: the model's name, for messages. It does not take part in `require_same`.
        num_layers: L, the number of routed layers.
        id_dtype: uint8 up to 256 experts, else uint16. The width follows the model, never the ids at hand.
    """

    num_experts: int
    top_k: int
    layers: tuple[RoutedLayer, ...]
    model: str = ""
    num_layers: int = field(init=False, repr=False, compare=False)
    id_dtype: np.dtype[np.uint8] | np.dtype[np.uint16] = field(init=False, repr=False, compare=False)

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
        object.__setattr__(self, "id_dtype", np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16))

    def __repr__(self) -> str:
        ends = f"{self.layers[0]} to {self.layers[-1]}" if len(self.layers) > 1 else f"{self.layers[0]}"
        return (
            f"RoutingSpec({self.model or 'model not stated'}, {self.num_layers} layers ({ends}), "
            f"top-{self.top_k} of {self.num_experts})"
        )

    def positions(self, layers: Iterable[RoutedLayer]) -> NDArray[np.int64]:
        """Return where the given layers stand on the layer axis, int64 [L'].

        Raises:
            TraceContentError: when something else than routed layers is given.
            SpecMismatchError: when a layer is not in the table.
        """
        # by name and never by number: a part of a model keeps the names of its layers, and not their places
        place = {layer: i for i, layer in enumerate(self.layers)}
        chosen = as_layers(layers)
        if missing := [str(layer) for layer in chosen if layer not in place]:
            raise SpecMismatchError(
                f"there are no routes of {', '.join(missing)}; the routed layers are {_names(self)}. Take layers of "
                "this table, or the trace that has them"
            )
        return np.array([place[layer] for layer in chosen], np.int64)

    def require_same(self, other: RoutingSpec, *, what: str) -> None:
        """Raise `SpecMismatchError` unless `other` has the same experts, picks and layer table.

        Args:
            other: the spec of the thing that `what` names.
            what: names the thing that carries `other`, for the message.
        """
        differences = []
        if other.num_experts != self.num_experts:
            differences.append(f"{other.num_experts} experts instead of {self.num_experts}")
        if other.top_k != self.top_k:
            differences.append(f"top-{other.top_k} instead of top-{self.top_k}")
        if other.layers != self.layers:
            differences.append(f"routed layers [{_names(other)}] instead of [{_names(self)}]")
        if differences:
            raise SpecMismatchError(
                f"{what} belongs to another model: it has {', '.join(differences)}. "
                f"Expected the routing of {self.model or 'this model'}; use the trace that was recorded for it."
            )


def layers_from(entries: Any) -> tuple[RoutedLayer, ...]:
    """Make a layer table of what a file has: a list of [number, kind].

    Raises:
        TraceContentError: when it is something else.
    """
    # counted before anything is made of them
    if not isinstance(entries, list) or len(entries) > MAX_LAYERS:
        raise TraceContentError(f"the layer table is {entries!r:.40}; expected a list of {MAX_LAYERS} layers at most")
    kinds = [kind.value for kind in LayerKind]
    for entry in entries:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str) and entry[1] in kinds):
            raise TraceContentError(f"a layer is {entry!r:.60}; expected [number, kind] with one of {', '.join(kinds)}")
    return tuple(RoutedLayer(number, LayerKind(kind)) for number, kind in entries)


def spec_from(table: Any, model: str) -> RoutingSpec:
    """Make the facts of a model of what a trace file has: a list of [number, kind, experts, picks].

    Raises:
        TraceContentError: when it is something else, or layers have different numbers of experts or picks.
    """
    if not isinstance(table, list) or not all(isinstance(entry, list) and len(entry) == 4 for entry in table):
        raise TraceContentError(f"the layer table is {table!r:.80}; expected a list of [number, kind, experts, picks]")
    layers = layers_from([entry[:2] for entry in table])
    sizes = [entry[2:] for entry in table]
    if any(size != sizes[0] for size in sizes):
        raise TraceContentError("its layers have different numbers of experts or picks, which no trace can hold yet")
    num_experts, top_k = sizes[0] if sizes else (1, 1)  # without a layer, there is no model to refuse
    return RoutingSpec(num_experts, top_k, layers, model)


def as_layers(layers: object) -> tuple[RoutedLayer, ...]:
    """Make a layer table of the routed layers that are given.

    Raises:
        TraceContentError: when they are something else.
    """
    table = tuple(layers) if isinstance(layers, Iterable) else None
    if table is None or not all(isinstance(layer, RoutedLayer) for layer in table):
        raise TraceContentError(
            f"the layers are {layers!r:.60}; expected routed layers, such as [RoutedLayer(0), RoutedLayer(1)]"
        )
    return table


def whole_number(
    value: object, *, name: str, least: int = 1, most: int, kind: type[InputError] = TraceContentError
) -> int:
    """Make an integer from `least` to `most`, of Python or numpy, one of Python.

    Raises:
        kind: when it is another number, or none: fractions, texts and truth values are not cast.
    """
    if not is_whole(value) or not least <= value <= most:
        raise kind(f"{name} is {shown(value)}; expected a whole number from {least} to {most}")
    return int(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Say whether it is an integer, and no truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _names(spec: RoutingSpec) -> str:
    return ", ".join(map(str, spec.layers))
