"""A Hugging Face model whose routing can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import transformers
from torch import nn

from foreroute.adapters.hf.discover import RouterSite
from foreroute.adapters.hf.intercept import Interceptor
from foreroute.adapters.hf.plans.hash_lookup import require_looked_up
from foreroute.adapters.hf.recording import Recording, refusing_beams
from foreroute.adapters.hf.session import ReplaySession
from foreroute.errors import TraceContentError
from foreroute.replay import (
    Counts,
    MissingRows,
    as_version,
    opened_once,
    require_choice,
    require_kind,
    require_switch,
    require_version,
)
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

    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters of all routers, in layer order: those that decide which experts a token is sent to."""
        return [parameter for site in self._sites for parameter in site.module.parameters()]

    @opened_once
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

        Raises:
            ConfigError: for a version that is no whole number, or a switch that is neither True nor False.
            ReplayError: when another thread has a session open on the model; and, in a forward, for what cannot be
                recorded.
        """
        stamped = as_version(weight_version)
        require_switch("margins", margins)
        require_switch("gate_weights", gate_weights)
        provenance = {"engine": "transformers", "engine_version": transformers.__version__}
        recording = Recording(self.spec, stamped, provenance, margins=margins, weights=gate_weights)
        with self._interceptor.listening(recording), refusing_beams(self.model):
            yield recording

    @opened_once
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
                versions that are accepted, such as `range(3, 6)` where rollouts may be two versions old. A range
                accepts no row whose version is not stated.
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
            TraceError: when `trace` is none.
            ConfigError: for a policy or a count that does not exist, or an argument of the wrong type.
            TraceContentError: when gate weights are asked for and the trace has none.
            BatchMismatchError: when a layer that routes by a table of tokens says otherwise; in the forward, when batch
                and trace hold different tokens, or rows are missing.
            ReplayError: when a router bypassed replay, no forward ran in the session, or another thread has a session
                open on the model or runs it.
        """
        require_kind(
            "what is to be replayed", trace, RoutingTrace, "a RoutingTrace, from a recording, `load` or `decode`"
        )
        self.spec.require_same(trace.spec, what="the trace")
        require_version(trace.versions, weight_version, "the trace")
        require_choice("missing", missing, MissingRows)
        require_choice("counts", counts, Counts)
        require_switch("telemetry", telemetry)
        require_switch("gate_weights", gate_weights)
        for position, site in enumerate(self._sites):
            if site.plan.is_lookup:
                require_looked_up(trace, position, site.module)
        if gate_weights and trace.gate_weights_NLK is None:
            raise TraceContentError(
                "the trace has no gate weights to replay; record it with record(gate_weights=True), or leave "
                "gate_weights out"
            )
        session = ReplaySession(trace, missing, telemetry=telemetry, counts=counts, gate_weights=gate_weights)
        with self._interceptor.listening(session):
            yield session
        session.close()
