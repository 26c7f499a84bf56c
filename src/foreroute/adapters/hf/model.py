"""A Hugging Face model whose routing can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from torch import nn

from foreroute.adapters.hf.batch import Batch
from foreroute.adapters.hf.discover import RouterSite
from foreroute.adapters.hf.intercept import Interceptor, Listener
from foreroute.adapters.hf.plans.hash_lookup import require_looked_up
from foreroute.adapters.hf.recording import Recording
from foreroute.errors import BatchMismatchError, ReplayError, StaleTraceError
from foreroute.layout import locate_rows
from foreroute.replay import ReplayRows
from foreroute.trace import NO_VERSION, RoutingSpec, RoutingTrace


class RoutedModel:
    """Recording and replaying sessions for one model. Made by `attach`.

    The model is untouched outside a session, and other models never notice.

    Attributes:
        model: the model that was attached.
        spec: its experts, picks and routed layers.
        router_paths: where its routers are, in layer order.
    """

    def __init__(self, model: nn.Module, spec: RoutingSpec, sites: list[RouterSite], interceptor: Interceptor) -> None:
        self.model = model
        self.spec = spec
        self.router_paths = tuple(site.path for site in sites)
        self._sites = sites
        self._interceptor = interceptor
        self._replaying = False

    @contextmanager
    def record(self, *, weight_version: int = NO_VERSION, margins: bool = False) -> Iterator[Recording]:
        """Record the routes of every forward of the model while the context is open.

        May be opened inside a `replay` session: what is recorded is what was executed.

        Args:
            weight_version: stamped on every row.
            margins: also keep the gap between the K-th and the (K+1)-th selection score.

        Yields:
            The recording; call its `trace()` at any time.
        """
        provenance = {"engine": "transformers", "engine_version": transformers.__version__}
        recording = Recording(self.spec, weight_version, provenance, margins)
        with self._interceptor.listening(recording):
            yield recording

    @contextmanager
    def replay(self, trace: RoutingTrace, *, weight_version: int | None = None) -> Iterator[None]:
        """Force the routes of `trace` in every forward of the model while the context is open.

        Only the selection is forced; gate weights and their gradients come from live scores. Each forward must run on
        the sequences of the trace, in order; the tokens are compared. Padding, and trailing tokens that the rollout
        never routed, are routed by the model itself. With the model's own activation checkpointing, `backward()` may
        run inside or outside the context.

        Args:
            trace: routes of the sequences of the batch, as `trace.select(...)` gives them for a micro-batch.
            weight_version: when given, the version that every routed row must have been recorded under.

        Raises:
            SpecMismatchError: when the trace belongs to another model.
            StaleTraceError: when it was recorded under another weight version.
            BatchMismatchError: when a layer that routes by a table of tokens says otherwise; in the forward, when batch
                and trace hold different tokens.
            ReplayError: when a router bypassed replay, or no forward ran in the session.
        """
        self.spec.require_same(trace.spec, what="the trace")
        _require_version(trace, weight_version)
        for position, site in enumerate(self._sites):
            if site.plan.is_lookup:
                require_looked_up(trace, position, site.module)
        if self._replaying:
            raise ReplayError("this model is already replaying a trace; close that session before opening another")
        session = _Replaying(trace)
        self._replaying = True
        try:
            with self._interceptor.listening(session):
                yield
        finally:
            self._replaying = False
        if not session.num_forwards:
            raise ReplayError("nothing was replayed: no forward of the attached model ran in the replay() session")


class _Replaying(Listener):
    def __init__(self, trace: RoutingTrace) -> None:
        self.num_forwards = 0
        self._trace = trace

    def begin(self, batch: Batch) -> ReplayRows:
        if batch.past:
            raise BatchMismatchError(
                f"the forward continues a key-value cache of {batch.past} positions; replay whole sequences, "
                "without a cache"
            )
        row_of_slot = locate_rows(self._trace, batch.input_ids_BT, batch.mask_BT)
        return ReplayRows.gather(self._trace, row_of_slot, batch.device)

    def end(self, batch: Batch) -> None:
        self.num_forwards += 1


def _require_version(trace: RoutingTrace, expected: int | None) -> None:
    if expected is not None and trace.versions != (expected,):
        raise StaleTraceError(
            f"the trace was recorded under weight versions {list(trace.versions)}, expected only {expected} "
            f"({NO_VERSION} means not stated). Replay the trace of the rollout that this update belongs to"
        )
