"""The kit is itself tested: an adapter that is broken in one way fails the check of that way, and no other."""

import re
from pathlib import Path

import pytest

from foreroute.conformance import ALL_CHECKS, KNOWN_BUGS, Outcome, run_conformance
from foreroute.conformance.kit import bugs_of
from foreroute.errors import ConfigError
from tests.adapters.megatron.test_conformance import BARE_FAILS
from tests.conformance import broken_rows, broken_sessions  # noqa: F401  fill the table
from tests.conformance.breaking import BROKEN, Adapter
from tests.conformance.peers.__main__ import COMPARISON, PAGE, short_table

IDS = [check.id for check in ALL_CHECKS]


@pytest.fixture
def unchecked(monkeypatch):
    """The good adapter under the broken one trusts the model: its self-check is a third of a run of the kit."""
    monkeypatch.setattr("foreroute.core.attaching.self_check", lambda *_: None)
    monkeypatch.setattr("foreroute.adapters.hf.attaching.check_indexers", lambda routed, indexers: None)


AT_ONCE = "routes-followed gate-rule masks-followed indexers-followed backward-outside-session duplicates-refused"
"""One of each file of checks."""
IN_ALL = {"gate-rule", "backward-outside-session"}
"""Of rows, and of sessions."""


def runs():
    """In the check that is to catch it each in CI and some at once; in all checks two in CI, and each by night."""
    for check, adapter in BROKEN.items():
        sooner = () if check in AT_ONCE.split() else pytest.mark.slow
        later = pytest.mark.slow if check in IN_ALL else pytest.mark.exhaustive
        yield pytest.param(check, [check], marks=sooner, id=f"{check}-itself")
        yield pytest.param(check, adapter.checks, marks=later, id=f"{check}-all")


@pytest.mark.parametrize(("check", "among"), list(runs()))
def test_a_broken_adapter_fails_its_own_check_and_no_other(check, among, unchecked):
    report = run_conformance(BROKEN[check](), only=among)
    assert report.failed == (check,), report.text()
    assert not report.ok


@pytest.mark.slow
def test_masks_that_have_the_gradient_of_all_tokens_are_not_followed(unchecked):
    assert run_conformance(broken_rows.MasksWithoutGradient(), only=["masks-followed"]).failed == ("masks-followed",)


def test_every_check_catches_an_adapter():
    """One of these, or the bare primitive of Megatron-Core."""
    assert BROKEN.keys() | BARE_FAILS.keys() == set(IDS)
    assert len(set(IDS)) == len(IDS)


def test_one_mistake_is_reported_once():
    report = run_conformance(BROKEN["gate-rule"](), only=["router-gradient", "masks-refused", "gate-rule"])
    assert report.failed == ("gate-rule",)
    assert report.with_outcome(Outcome.BLOCKED) == ("router-gradient", "masks-refused")
    assert {result.root for result in report.results} == {"gate-rule"}


def test_known_bugs_and_checks_refer_to_each_other():
    assert len(KNOWN_BUGS) == 51
    assert {check for bug in KNOWN_BUGS for check in bug.checks} <= set(IDS)
    for bug in KNOWN_BUGS:
        assert bool(bug.checks) != bool(bug.outside), f"{bug.id} needs a check, or the reason why it has none"
    assert [bug.id for bug in bugs_of("mtp-alias")] == ["14"]


def test_the_page_lists_every_check():
    page = (Path(__file__).parents[2] / "docs" / "new-adapter.md").read_text(encoding="utf-8")
    listed = page.partition("\n### The checks\n")[2].partition("\n- ")[2].partition("\n## ")[0]
    assert re.findall(r"`([a-z-]+)`", listed) == IDS


def test_the_comparison_has_the_scores_of_its_page():
    text = PAGE.read_text(encoding="utf-8")
    assert f"\n\n{short_table(text)}\n\n" in COMPARISON.read_text(encoding="utf-8")
    assert short_table(text.replace("●", "○")) != short_table(text)


def test_an_unknown_check_is_refused():
    with pytest.raises(ConfigError, match=r"tokenshift.*followed"):
        run_conformance(Adapter(), only=["tokenshift"])
