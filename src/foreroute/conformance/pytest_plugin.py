"""The kit as tests, one for each check.

from foreroute.conformance.pytest_plugin import conformance_tests

test_conformance = conformance_tests(MyAdapter())
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from foreroute.conformance.adapter import AdapterUnderTest
from foreroute.conformance.check import Outcome, run_check
from foreroute.conformance.checks import ALL_CHECKS
from foreroute.conformance.situation import Situation


def conformance_tests(*adapters: AdapterUnderTest, only: Collection[str] | None = None) -> Any:
    """A test function with one case per adapter and check: failed checks fail, blocked ones too, others skip.

    Args:
        *adapters: what their authors wrote for the kit.
        only: ids of the checks to run; all by default.
    """
    cases: list[Any] = []
    for adapter in adapters:
        situation = Situation(adapter)
        chosen = [check for check in ALL_CHECKS if only is None or check.id in only]
        cases += [pytest.param(situation, check, id=f"{adapter.name}-{check.id}") for check in chosen]

    @pytest.mark.parametrize(("situation", "check"), cases)
    def test(situation: Situation, check: Any) -> None:
        result = run_check(check, situation)
        if result.outcome is Outcome.NOT_APPLICABLE:
            pytest.skip(result.reason)
        assert result.outcome is Outcome.PASSED, f"{check.title}: {result.reason}"

    return test
