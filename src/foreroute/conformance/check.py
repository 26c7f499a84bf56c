"""A named check, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from foreroute.conformance.adapter import Unsupported
from foreroute.conformance.situation import Blocked, Broken, Situation

LONGEST_REASON = 300


class Outcome(StrEnum):
    """What came of a check. `BLOCKED` is no pass: another check failed and this one could say nothing."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Check:
    """One property of an adapter.

    Attributes:
        id: short name; known bugs refer to it.
        title: the property, as a sentence that is true of a right adapter.
        does: how it is looked at.
        run: raises `Broken` when the property does not hold.
        quick: needs only forwards of one model of the family's own shape, so it can run on a user's model.
    """

    id: str
    title: str
    does: str
    run: Callable[[Situation], None]
    quick: bool = False


@dataclass(frozen=True)
class CheckResult:
    """What came of one check.

    Attributes:
        check: the check.
        outcome: passed, failed, not applicable or blocked.
        reason: what was seen, why it does not apply, or which check blocks it; empty when passed.
    """

    check: Check
    outcome: Outcome
    reason: str = ""


def run_check(check: Check, situation: Situation) -> CheckResult:
    """Run one check. Whatever the adapter raises where it should have worked is a failure, with the error as reason."""
    try:
        check.run(situation)
    except Broken as broken:
        return CheckResult(check, Outcome.FAILED, str(broken))
    except Blocked as blocked:
        return CheckResult(check, Outcome.BLOCKED, f"can be judged when {blocked} passes")
    except Unsupported as reason:
        return CheckResult(check, Outcome.NOT_APPLICABLE, str(reason))
    except Exception as error:
        return CheckResult(check, Outcome.FAILED, f"raised {type(error).__name__}: {_beginning(str(error))}")
    return CheckResult(check, Outcome.PASSED)


def _beginning(message: str) -> str:
    """The first line or so: torch lists every tensor that a recomputation made differently."""
    line = message.strip().partition("\n")[0]
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + " ..."
