"""Running the kit: its checks, its report with the known bugs that each check looks for, and the kit as tests."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources import files
from textwrap import wrap
from typing import Any

from foreroute.conformance import gate_checks, indexer_checks, mask_checks, refusal_checks, route_checks, session_checks
from foreroute.conformance.adapter import AdapterUnderTest, Unsupported
from foreroute.conformance.check import Check, CheckContext, CheckFailed, CheckResult, Outcome
from foreroute.errors import ConfigError

GITHUB = "https://github.com/"
ALL_CHECKS: tuple[Check, ...] = (
    *route_checks.CHECKS,
    *gate_checks.CHECKS,
    *mask_checks.CHECKS,
    *indexer_checks.CHECKS,
    *session_checks.CHECKS,
    *refusal_checks.CHECKS,
)
"""Every check, in the order in which they run and are reported."""
LONGEST_REASON = 300
"""Characters of an error message that a reason quotes."""
_BY_ID = {check.id: check for check in ALL_CHECKS}
_MARKS = {Outcome.PASSED: "ok", Outcome.FAILED: "FAIL", Outcome.NOT_APPLICABLE: "-", Outcome.BLOCKED: "blocked"}


@dataclass(frozen=True)
class ConformanceReport:
    """Results of all checks.

    Attributes:
        adapter: its name.
        results: one per check, in the order of the kit.
    """

    adapter: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """Say whether every check passed or does not apply."""
        return all(r.outcome in (Outcome.PASSED, Outcome.NOT_APPLICABLE) for r in self.results)

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the checks that failed."""
        return self.with_outcome(Outcome.FAILED)

    def with_outcome(self, outcome: Outcome) -> tuple[str, ...]:
        """Ids of the checks with this outcome."""
        return tuple(r.check.id for r in self.results if r.outcome is outcome)

    def text(self) -> str:
        """A table for a terminal, with the reasons and, for what failed, where the same bug was seen before."""
        counts = {outcome: len(self.with_outcome(outcome)) for outcome in Outcome}
        summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        lines = [f"{self.adapter}: {summary}", ""]
        for result in self.results:
            lines.append(f"{_MARKS[result.outcome]:>8}  {result.check.id:<25} {result.check.title}")
            details = [result.reason] if result.reason else []
            if result.outcome is Outcome.FAILED:
                details += [f"seen before: {bug.title} {bug.seen}" for bug in bugs_of(result.check.id)]
            # names of parameters and addresses stay whole, to be copied
            lines += [f"{'':>10}{part}" for detail in details for part in wrap(detail, 110, break_long_words=False)]
        return "\n".join(lines) + "\n"


def run_conformance(
    adapter: AdapterUnderTest, *, only: Collection[str] | None = None, seed: int = 0
) -> ConformanceReport:
    """Run the checks on an adapter.

    Args:
        adapter: what its author wrote for the kit.
        only: ids of the checks to run; all by default.
        seed: of batches and routes.

    Raises:
        ConfigError: for an id in `only` that no check has.
    """
    # one context for all: what checks have in common is built once
    context = CheckContext(adapter, seed)
    return ConformanceReport(adapter.name, tuple(run_check(check, context) for check in _chosen(only)))


def run_check(check: Check, context: CheckContext) -> CheckResult:
    """Run one check, and before it those that it needs, where that was not done before.

    Whatever the adapter raises where it should have worked is a failure, with the error as reason.
    """
    if check.id not in context.results:
        needed = (run_check(_BY_ID[other], context) for other in check.needs)
        # the first cause and not the nearest: one mistake is reported once
        root = next((result.root for result in needed if result.root), "")
        blocked = CheckResult(check, Outcome.BLOCKED, f"can be judged when {root} passes", root)
        context.results[check.id] = blocked if root else _run(check, context)
    return context.results[check.id]


def _run(check: Check, context: CheckContext) -> CheckResult:
    """Run a check whose needs are met."""
    try:
        check.run(context)
    except CheckFailed as failed:
        return CheckResult(check, Outcome.FAILED, str(failed), check.id)
    except Unsupported as reason:
        return CheckResult(check, Outcome.NOT_APPLICABLE, str(reason))
    except Exception as error:  # an adapter raises what it likes
        return CheckResult(check, Outcome.FAILED, f"raised {type(error).__name__}: {_beginning(str(error))}", check.id)
    return CheckResult(check, Outcome.PASSED)


def _beginning(message: str) -> str:
    """The first line or so: torch lists every tensor that a recomputation made differently."""
    line = message.strip().partition("\n")[0]
    return line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + " ..."


def _chosen(only: Collection[str] | None) -> list[Check]:
    """The checks to run, in the order of the kit."""
    if unknown := sorted(set(only or ()) - _BY_ID.keys()):
        raise ConfigError(f"there is no check {', '.join(unknown)}; known are {', '.join(_BY_ID)}")
    return [check for check in ALL_CHECKS if only is None or check.id in only]


def conformance_tests(*adapters: AdapterUnderTest, only: Collection[str] | None = None) -> Any:
    """A test function with one case per adapter and check: failed checks fail, blocked ones too, others skip.

    A test module says `test_conformance = conformance_tests(MyAdapter())`.

    Args:
        *adapters: what their authors wrote for the kit.
        only: ids of the checks to run; all by default.
    """
    import pytest  # a report needs none

    contexts = [CheckContext(adapter) for adapter in adapters]
    cases: list[Any] = [
        pytest.param(context, check, id=f"{context.adapter.name}-{check.id}")
        for context in contexts
        for check in _chosen(only)
    ]

    @pytest.mark.parametrize(("context", "check"), cases)
    def test(context: CheckContext, check: Any) -> None:
        result = run_check(check, context)
        # a blocked check fails too: nobody has shown what it asks
        if result.outcome is Outcome.NOT_APPLICABLE:
            pytest.skip(result.reason)
        assert result.outcome is Outcome.PASSED, f"{check.title}: {result.reason}"

    return test


@dataclass(frozen=True)
class KnownBug:
    """A bug that was met in public.

    Attributes:
        id: stable name, its number in the list.
        title: what went wrong.
        seen: where, as an address, or the project when it was read in its code.
        checks: ids of the checks that look for it.
        outside: why no check can, when `checks` is empty.
    """

    id: str
    title: str
    seen: str
    checks: tuple[str, ...] = ()
    outside: str = ""


def bugs_of(check: str) -> tuple[KnownBug, ...]:
    """The known bugs that a check looks for."""
    return tuple(bug for bug in KNOWN_BUGS if check in bug.checks)


def _known_bugs() -> tuple[KnownBug, ...]:
    text = files(__package__).joinpath("known_bugs.toml").read_text(encoding="utf-8")
    bugs = tomllib.loads(text)["bugs"]
    for bug in bugs:
        # a project that was read has no address of a thread
        bug["seen"] = GITHUB + bug["seen"] if "/" in bug["seen"] else bug["seen"]
        bug["checks"] = tuple(bug.get("checks", ()))
    return tuple(KnownBug(**bug) for bug in bugs)


KNOWN_BUGS = _known_bugs()
"""The publicly known bugs of routing replay, each with the check that finds it or what avoids it outside an adapter."""
