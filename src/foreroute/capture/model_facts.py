"""What must be known about a model before an engine's layer axis can be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.recognition import shown, whole_number
from foreroute.errors import CaptureError
from foreroute.trace import IndexerSpec, LayerKind, RoutingSpec

MOST = 1 << 31
"""Layers or tokens of a vocabulary that a model may have."""


@dataclass(frozen=True)
class ModelFacts:
    """What must be known of a model to read its captures: routing, layers dense ones included, vocabulary, indexers.

    Attributes:
        spec: experts, picks and routed layers. Engines return decoder layers only, so MTP and draft layers are refused.
        num_hidden_layers: decoder layers in all, `num_hidden_layers` of the model's configuration. None when it is not
            known: then only a layer axis of exactly the routed layers can be read.
        vocabulary_size: tokens that the model can be given. None when it is not known: then no token is refused.
        indexers: of its sparse attention, such as `hf.attach(model).indexers`; None where it has none, or they are not
            known: then their choices are refused.
    """

    spec: RoutingSpec
    num_hidden_layers: int | None = None
    vocabulary_size: int | None = None
    indexers: IndexerSpec | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.spec, RoutingSpec):
            raise CaptureError(f"the model is {shown(self.spec)}; expected a RoutingSpec or ModelFacts")
        if not isinstance(self.indexers, IndexerSpec | None):
            raise CaptureError(f"indexers are {shown(self.indexers)}; expected an IndexerSpec, or None")
        for name in ("num_hidden_layers", "vocabulary_size"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(getattr(self, name), name, 1, MOST))
        kinds = {layer.kind for layer in self.spec.layers}
        if kinds & {LayerKind.MTP, LayerKind.DRAFT}:
            raise CaptureError(
                f"the spec of {self.spec.model or 'the model'} lists MTP or draft layers; no engine returns those, "
                "pass a spec of the decoder layers alone"
            )
        last = max(layer.index for layer in self.spec.layers)
        if self.num_hidden_layers is not None and self.num_hidden_layers <= last:
            raise CaptureError(
                f"num_hidden_layers is {self.num_hidden_layers}, but the spec routes decoder layer {last}; "
                "expected the count of all decoder layers, dense ones included"
            )
        indices = [layer.index for layer in self.spec.layers]
        if self.num_hidden_layers is not None and len(set(indices)) < len(indices):
            twice = next(index for index in indices if indices.count(index) > 1)
            raise CaptureError(
                f"the spec of {self.spec.model or 'the model'} has two routers in layer {twice}, and an axis of all "
                "layers has one column for both; leave num_hidden_layers out"
            )

    @property
    def axis_lengths(self) -> tuple[int, ...]:
        """The lengths that a layer axis may have: the routed layers, or all decoder layers."""
        lengths = {self.spec.num_layers, self.num_hidden_layers or self.spec.num_layers}
        return tuple(sorted(lengths))

    def routed_columns(self, axis_length: int, *, what: str) -> NDArray[np.int64]:
        """Return where the routed layers lie on an axis of `axis_length` layers, int64 [L].

        Raises:
            CaptureError: when the axis is neither the routed layers nor all decoder layers.
        """
        if axis_length == self.spec.num_layers:
            return np.arange(self.spec.num_layers)
        if axis_length == self.num_hidden_layers:
            return np.array([layer.index for layer in self.spec.layers])
        raise CaptureError(f"{what} has {axis_length} layers; expected {self._expected()}. {self._advice(axis_length)}")

    def _expected(self) -> str:
        routed = f"{self.spec.num_layers} (the routed layers)"
        if self.num_hidden_layers is None or self.num_hidden_layers == self.spec.num_layers:
            return routed
        return f"{routed} or {self.num_hidden_layers} (all decoder layers)"

    def _advice(self, axis_length: int) -> str:
        if axis_length - 1 in self.axis_lengths:
            return (
                "One layer too many: a draft or MTP layer may pose as a decoder layer. "
                "Switch off its capture, or upgrade the engine (vLLM 0.26, SGLang 0.5.15)"
            )
        if self.num_hidden_layers is None and axis_length > max(layer.index for layer in self.spec.layers):
            return "If the engine counts dense layers too, pass ModelFacts(spec, num_hidden_layers=...)"
        return "Pipeline stages may not have been joined, or the trace is of another model"
