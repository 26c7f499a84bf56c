"""docs/comparison.md has the scores of README.md beside this file, which `make scores` writes."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from foreroute.conformance import ALL_CHECKS
from foreroute.conformance.check import CheckFailed
from tests.conformance.peers import __main__ as command
from tests.conformance.peers.__main__ import COMPARISON, PAGE, short_table
from tests.conformance.peers.scores import smallest


def test_the_comparison_has_the_scores_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    assert f"\n\n{short_table(text)}\n\n" in COMPARISON.read_text(encoding="utf-8")
    assert short_table(text.replace("●", "○")) != short_table(text)


def test_a_page_of_some_peers_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["peers", "veomni", "--page"])
    monkeypatch.setattr(command, "scores_apart", lambda peer: pytest.fail(f"{peer} ran"))
    with pytest.raises(SystemExit):
        command.main()
    assert "has all peers" in capsys.readouterr().err


def test_the_reason_is_that_of_the_fewest_tokens():
    def run(context):
        sequences = context.batch(5, 5, 5).sequences
        if len(sequences) > 1:
            raise CheckFailed(f"{len(sequences)} x {len(sequences[0])}")

    found = smallest(SimpleNamespace(vocabulary=9), replace(ALL_CHECKS[0], run=run), "3 x 5")
    assert found == ("2 x 1", "2 x 1")
