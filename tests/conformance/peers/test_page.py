"""docs/comparison.md has the scores of README.md beside this file, which `make scores` writes."""

from tests.conformance.peers.__main__ import COMPARISON, PAGE, short_table


def test_the_comparison_has_the_scores_of_the_page():
    text = PAGE.read_text(encoding="utf-8")
    assert f"\n\n{short_table(text)}\n\n" in COMPARISON.read_text(encoding="utf-8")
    assert short_table(text.replace("●", "○")) != short_table(text)
