"""A Hugging Face model whose routing can be recorded and replayed: where its batches take their routes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import transformers
from torch import Tensor, nn

from foreroute.adapters.hf.discover import RouterSite
from foreroute.adapters.hf.forward_args import BatchRoutes, ForwardTokens
from foreroute.adapters.hf.hooks import TransformerHooks
from foreroute.adapters.hf.selection_rules import require_looked_up
from foreroute.errors import ReplayError, TraceContentError
from foreroute.layout import Layout
from foreroute.replay import (
    ForwardRows,
    Policy,
    RecordedPass,
    RoutedModel,
    not_of_kind,
    overridden,
)
from foreroute.trace import RoutingSpec, RoutingTrace


class RoutedTransformer(RoutedModel):
    """Recording and replaying sessions for one Hugging Face model. Made by `attach`.

    Attributes:
        model: the model that was attached.
    """

    def __init__(self, model: nn.Module, spec: RoutingSpec, sites: list[RouterSite], hooks: TransformerHooks) -> None:
        super().__init__(spec, [hooks], {"engine": "transformers", "engine_version": transformers.__version__})
        self.model = model
        self._sites = sites

    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters of all routers, in layer order: those that decide which experts a token is sent to."""
        return [parameter for site in self._sites for parameter in site.module.parameters()]

    def routes_of(self, routes: Any, layout: Layout | None, policy: Policy) -> BatchRoutes:
        """The rows of a trace, found for each batch. See `RoutedModel`."""
        if not isinstance(routes, RoutingTrace):
            raise not_of_kind("what is to be replayed", routes, "a RoutingTrace, from a recording, `load` or `decode`")
        trace = routes
        self.spec.require_same(trace.spec, what="the trace")
        if policy.gate_weights and trace.gate_weights_NLK is None:
            raise TraceContentError(
                "the trace has no gate weights to replay; record it with record(gate_weights=True), or leave "
                "gate_weights out"
            )
        for position, site in enumerate(self._sites):
            if site.rule.is_lookup:
                require_looked_up(trace, position, site.module)
        return BatchRoutes(trace, layout, policy)

    def rows_of(self, passes: list[list[RecordedPass]]) -> list[ForwardRows]:
        """Of one chunk and one rank. See `RoutedModel`."""
        return [_rows_of_pass(recorded, self.spec) for recorded in passes[0]]

    def while_recording(self) -> AbstractContextManager[None]:
        """Have `model.generate` refuse to sample in beams."""
        return _refusing_beams(self.model)


def _rows_of_pass(recorded: RecordedPass, spec: RoutingSpec) -> ForwardRows:
    batch: ForwardTokens = recorded.args
    kept_BT, starts_BT = batch.kept_BT, batch.starts_BT
    kept_R = kept_BT.reshape(-1)

    def packed(of_slots: Tensor | None) -> Any:
        return None if of_slots is None else of_slots.cpu().numpy().swapaxes(0, 1)[kept_R]

    if starts_BT is None:
        lengths_S = np.asarray(kept_BT.sum(axis=1))
    else:
        lengths_S = np.diff(np.flatnonzero(starts_BT[kept_BT]), append=kept_BT.sum())
    return ForwardRows(
        lengths_S,
        batch.input_ids_BT[kept_BT],
        packed(recorded.ids_LRK),
        packed(recorded.margin_LR),
        packed(recorded.weights_LRK),
        batch.past,
        batch.shape[1] if starts_BT is None else None,
    )


@contextmanager
def _refusing_beams(model: nn.Module) -> Iterator[None]:
    """Have `model.generate` refuse to sample in beams while the context is open."""
    if not callable(getattr(model, "generate", None)):
        yield
        return

    def generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        require_no_beams(model, args, kwargs)
        return original(*args, **kwargs)

    with overridden(model, "generate", generate):
        yield


def require_no_beams(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `ReplayError` if a call of `model.generate` would have rows of a batch change places."""
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    own = getattr(model, "generation_config", None)
    stated = [kwargs.get("num_beams"), *(getattr(config, "num_beams", None) for config in (given, own))]
    num_beams = next((number for number in stated if isinstance(number, int)), 1)
    if num_beams > 1:
        raise ReplayError(
            f"generate() was asked for num_beams={num_beams}: beams change places from token to token, so that what a "
            "router did for a row of the batch is not what it did for the sequence that is returned. Sample with "
            "num_beams=1, or record one forward over what the beam search returned"
        )
