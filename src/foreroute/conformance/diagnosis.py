"""What a doctor makes of evidence about a trainer and an engine: findings in plain words. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from numpy.typing import NDArray

from foreroute.conformance.kit import ConformanceReport
from foreroute.mismatch import (
    Explanation,
    RoutingMismatch,
    TokenMismatch,
    explain,
    routing_mismatch,
    token_mismatch,
)
from foreroute.trace import RoutingTrace


class Severity(IntEnum):
    """How bad a finding is."""

    FINE = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: how bad it is.
        topic: "wiring", "routes", "probabilities", "replay" or "trainer".
        sentence: what was seen, in plain words.
        advice: what to do; empty when there is nothing to do.
    """

    severity: Severity
    topic: str
    sentence: str
    advice: str = ""


@dataclass(frozen=True, eq=False)
class TrainerPass:
    """One pass of the trainer over the sequences.

    Attributes:
        executed: the routes it took; None where only log-probs are known.
        logprobs_R: of the response tokens, sequence after sequence; None where only routes are known.
    """

    executed: RoutingTrace | None
    logprobs_R: NDArray[Any] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What is known. Whatever is None was not looked at.

    Attributes:
        engine: the trace in question.
        engine_logprobs_R: the engine's log-probs of the response tokens.
        native: the trainer on its own routes.
        replayed: the trainer on the engine's routes.
        repeated: the trainer on its own routes once more, on the same batches.
        repacked: the trainer on its own routes, one sequence at a time.
        conformance: the quick checks, run on this model.
        attach_error: why the adapter refused the model.
        replay_error: why the trace could not be replayed.
        expected_version: the weight version that the trainer is at.
        random_weights: the model was made from a configuration alone, so that only its wiring counts.
    """

    engine: RoutingTrace | None = None
    engine_logprobs_R: NDArray[Any] | None = None
    native: TrainerPass | None = None
    replayed: TrainerPass | None = None
    repeated: TrainerPass | None = None
    repacked: TrainerPass | None = None
    conformance: ConformanceReport | None = None
    attach_error: str = ""
    replay_error: str = ""
    expected_version: int | None = None
    random_weights: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Measures:
    """Everything that was measured; None where the evidence is missing.

    Attributes:
        without: engine against trainer on its own routes.
        with_replay: engine against trainer on the engine's routes.
        repeated, repacked: trainer against itself.
        routes: engine's routes against the trainer's own.
        repacked_routes: the trainer's own routes against those when it is packed differently.
        explanation: what sets engine's and trainer's routes apart.
    """

    without: TokenMismatch | None = None
    with_replay: TokenMismatch | None = None
    repeated: TokenMismatch | None = None
    repacked: TokenMismatch | None = None
    routes: RoutingMismatch | None = None
    repacked_routes: RoutingMismatch | None = None
    explanation: Explanation | None = None

    @property
    def gain(self) -> float | None:
        """k3 without over k3 with replay."""
        if self.without is None or self.with_replay is None:
            return None
        return self.without.k3 / max(self.with_replay.k3, 1e-12)

    @property
    def floor(self) -> float:
        """The k3 that no replay undercuts: what the trainer shows against itself, packed differently."""
        return max(3 * self.repacked.k3, 1e-9) if self.repacked is not None else 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """Findings, worst first within each topic's order, and the figures behind them.

    Attributes:
        headline: the one sentence to read.
        findings: in the order in which they should be read.
        measures: the figures.
        facts: what was examined, as short strings.
    """

    headline: str
    findings: tuple[Finding, ...]
    measures: Measures
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> Severity:
        """The severity of the worst finding."""
        return max((finding.severity for finding in self.findings), default=Severity.FINE)


def measure(evidence: Evidence) -> Measures:
    """The figures of the evidence.

    Raises:
        SpecMismatchError, BatchMismatchError: when traces of other models or tokens are compared.
        InputError: when log-probs do not fit together.
    """
    engine, native = evidence.engine, evidence.native
    comparable = engine is not None and native is not None and native.executed is not None
    own = native.executed if native is not None else None
    if comparable and engine is not None and own is not None and len(engine.versions) == 1:
        own = own.with_weight_version(
            engine.versions[0] if evidence.expected_version is None else evidence.expected_version
        )
    repacked = evidence.repacked.executed if evidence.repacked is not None else None
    return Measures(
        without=_tokens(native, evidence.engine_logprobs_R),
        with_replay=_tokens(evidence.replayed, evidence.engine_logprobs_R),
        repeated=_tokens(evidence.repeated, native.logprobs_R if native else None),
        repacked=_tokens(evidence.repacked, native.logprobs_R if native else None),
        routes=routing_mismatch(engine, own) if engine is not None and own is not None else None,
        repacked_routes=routing_mismatch(own, repacked) if own is not None and repacked is not None else None,
        explanation=explain(own, engine) if engine is not None and own is not None else None,
    )


def _tokens(trainer: TrainerPass | None, reference: NDArray[Any] | None) -> TokenMismatch | None:
    if trainer is None or trainer.logprobs_R is None or reference is None:
        return None
    return token_mismatch(trainer.logprobs_R, reference)
