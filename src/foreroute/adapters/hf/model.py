"""A Hugging Face model whose routing can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import transformers
from torch import nn

from foreroute.adapters.hf.discover import RouterSite
from foreroute.adapters.hf.intercept import Interceptor
from foreroute.adapters.hf.plans.hash_lookup import require_looked_up
from foreroute.adapters.hf.recording import Recording
from foreroute.adapters.hf.session import ReplaySession
from foreroute.errors import ConfigError, ReplayError, StaleTraceError, TraceContentError
from foreroute.replay import Counts, MissingRows
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

    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters of all routers, in layer order: those that decide which experts a token is sent to."""
        return [parameter for site in self._sites for parameter in site.module.parameters()]

    @contextmanager
    def record(
        self, *, weight_version: int = NO_VERSION, margins: bool = False, gate_weights: bool = False
    ) -> Iterator[Recording]:
        """Record the routes of every forward of the model while the context is open.

        May be opened inside a `replay` session: what is recorded is what was executed.

        Args:
            weight_version: stamped on every row.
            margins: also keep the gap between the K-th and the (K+1)-th selection score.
            gate_weights: also keep what the router hands on as the weight of each pick, in float32.

        Yields:
            The recording; call its `trace()` at any time.
        """
        provenance = {"engine": "transformers", "engine_version": transformers.__version__}
        recording = Recording(self.spec, weight_version, provenance, margins=margins, weights=gate_weights)
        with self._interceptor.listening(recording):
            yield recording

    @contextmanager
    def replay(
        self,
        trace: RoutingTrace,
        *,
        weight_version: int | Collection[int] | None = None,
        missing: MissingRows = "error",
        telemetry: bool = False,
        counts: Counts = "native",
        gate_weights: bool = False,
    ) -> Iterator[ReplaySession]:
        """Force the routes of `trace` in every forward of the model while the context is open.

        Only the selection is forced; gate weights and their gradients come from live scores. Each forward must run on
        the sequences of the trace, in order: one per row, padded on either side, or several per row where
        `position_ids` start anew at 0 (or `cu_seq_lens_q` says so). The tokens are compared. Padding and the last token
        of each sequence are routed by the model itself. With activation checkpointing, `backward()` may run inside or
        outside the context.

        Args:
            trace: routes of the sequences of the batch, as `trace.select(...)` gives them for a micro-batch.
            weight_version: when given, the version that every routed row must have been recorded under, or the
                versions that are accepted, such as `range(3, 6)` where rollouts may be two versions old.
            missing: what to do when any other row has no route: refuse the batch ("error"), let the model route it
                ("native"), or that and take the tokens after it out of the loss by `session.loss_mask_BT` ("drop").
            telemetry: also let each router select by itself, for `session.agreement()` and `expert_counts_LE()`.
            counts: which selection the model's auxiliary load-balancing loss, and `expert_counts_LE()`, count.
            gate_weights: force the gate weights of the trace too, as constants. No gradient reaches a router through
                them.

        Yields:
            The session.

        Raises:
            SpecMismatchError: when the trace belongs to another model.
            StaleTraceError: when it was recorded under another weight version.
            ConfigError: for a policy or a count that does not exist.
            TraceContentError: when gate weights are asked for and the trace has none.
            BatchMismatchError: when a layer that routes by a table of tokens says otherwise; in the forward, when batch
                and trace hold different tokens, or rows are missing.
            ReplayError: when a router bypassed replay, or no forward ran in the session.
        """
        self.spec.require_same(trace.spec, what="the trace")
        _require_version(trace, weight_version)
        _require_choice("missing", missing, MissingRows)
        _require_choice("counts", counts, Counts)
        for position, site in enumerate(self._sites):
            if site.plan.is_lookup:
                require_looked_up(trace, position, site.module)
        if self._replaying:
            raise ReplayError("this model is already replaying a trace; close that session before opening another")
        if gate_weights and trace.gate_weights_NLK is None:
            raise TraceContentError(
                "the trace has no gate weights to replay; record it with record(gate_weights=True), or leave "
                "gate_weights out"
            )
        session = ReplaySession(trace, missing, telemetry=telemetry, counts=counts, gate_weights=gate_weights)
        self._replaying = True
        try:
            with self._interceptor.listening(session):
                yield session
        finally:
            self._replaying = False
        session.close()


def _require_version(trace: RoutingTrace, expected: int | Collection[int] | None) -> None:
    if expected is None:
        return
    accepted = sorted(set(expected) if isinstance(expected, Collection) else {expected})
    if not trace.versions or not set(trace.versions) <= set(accepted):
        raise StaleTraceError(
            f"the trace was recorded under weight versions {list(trace.versions)}, expected only "
            f"{', '.join(map(str, accepted))} ({NO_VERSION} means not stated). Replay the trace of the rollout that "
            "this update belongs to"
        )


def _require_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}; expected one of {', '.join(map(repr, get_args(choices)))}")
