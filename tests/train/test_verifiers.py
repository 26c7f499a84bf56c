"""The built-in rewards, by hand; and arithmetic against Python's own, exactly."""

import random
import time
from fractions import Fraction

import pytest

from foreroute.errors import ConfigError, DatasetError, FunctionError
from foreroute.train.tasks.jsonl import Row
from foreroute.train.tasks.verifiers import evaluate, make_verifier


def expression(rng, depth):
    if depth == 0:
        return str(rng.randint(0, 12))
    left, right = expression(rng, rng.randrange(depth)), expression(rng, rng.randrange(depth))
    return rng.choice(["({}+{})", "({}-{})", "({}*{})", "({}/{})", "-({}+{})"]).format(left, right)


def test_expressions_have_the_value_that_fractions_have():
    rng = random.Random(0)
    for _ in range(200):
        text = expression(rng, 5)
        by_fractions = "".join(f"Fraction({part})" if part.isdigit() else part for part in tokens_of(text))
        try:
            expected = eval(by_fractions, {"Fraction": Fraction})
        except ZeroDivisionError:
            expected = None
        assert evaluate(text) == expected, text


def tokens_of(text):
    import re

    return re.findall(r"\d+|\D", text)


@pytest.mark.parametrize(
    "text",
    ["", "2**9999999", "7//2", "a", "__import__('os')", "1e9", "3j", "1_0", "(" * 900, "(" * 400 + "1" + ")" * 400,
     "1/0", "2 3", "007", "9" * 1001, "1.2.3", "(1,2)"],
)  # fmt: skip
def test_what_is_no_arithmetic_has_no_value(text):
    assert evaluate(text) is None


def test_decimals_are_exact():
    assert evaluate("0.1 + 0.2") == Fraction(3, 10)
    assert 0.1 + 0.2 != 0.3


@pytest.mark.parametrize(
    ("name", "row", "right", "wrong"),
    [
        ("exact_match", {"answer": "12"}, ["12", " 12\n"], ["12.", "the answer is 12", ""]),
        ("arithmetic", {"answer": "12"}, ["12", "so\n3*4 = 12", "24/2", "11.5+0.5"], ["13", "12\nno", "twelve", ""]),
        ("arithmetic", {"answer": "1/3"}, ["2/6"], ["0.333333333333"]),
        ("countdown", {"numbers": [3, 5, 7], "target": 22}, ["3*5+7", "first\n 7+(5*3) = 22", "7 - -3*5"],
         ["22", "3*5+7+0", "3*5", "3*57", "3*5+7*1", "3*5*7", "5*5-3", "3*5+7.0", "", "x"]),
    ],
)  # fmt: skip
def test_right_and_wrong_responses(name, row, right, wrong):
    verifier = make_verifier(name, None, timeout_s=1.0)
    assert [verifier.is_right(row, response) for response in right] == [True] * len(right)
    assert [verifier.is_right(row, response) for response in wrong] == [False] * len(wrong)


@pytest.fixture
def pattern():
    """Makes verifiers of patterns, and ends their processes."""
    made = []

    def make(text):
        made.append(make_verifier("regex", text, timeout_s=0.5))
        return made[-1].is_right

    yield make
    for verifier in made:
        verifier.close()


def test_a_pattern_finds_the_answer_in_its_last_match(pattern):
    is_right = pattern(r"#### (-?\d+)")
    assert is_right({"answer": "12"}, "#### 3\n#### 12")
    assert not is_right({"answer": "12"}, "#### 12\n#### 3")
    assert not is_right({"answer": "12"}, "12")
    assert pattern("yes|no")({"answer": "no"}, "yes, or no")
    assert not pattern("(a)|b")({"answer": "a"}, "b"), "the group found nothing"


def test_a_pattern_that_looks_for_too_long_is_ended_and_the_next_response_is_judged(pattern):
    is_right = pattern("(a+)+$")
    before = time.monotonic()
    with pytest.raises(FunctionError, match=r"task\.pattern = '\(a\+\)\+\$' took more than 0\.5 s and was ended"):
        is_right({"answer": "a"}, "a" * 40 + "b")
    assert time.monotonic() - before < 5
    assert is_right({"answer": "aa"}, "aa")


@pytest.mark.parametrize(
    "text", ["(", "a{99999999999}", "(" * 2000 + "a" + ")" * 2000, "a{2,1}", "(?P<a>x)(?P<a>y)", "\\"]
)
def test_what_is_no_pattern_is_refused_by_name(pattern, text):
    with pytest.raises(ConfigError, match=r"task\.pattern = .* is no regular expression: \w+") as caught:
        pattern(text)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("exact_match", {}, 'data.jsonl, line 7: no "answer"; expected one'),
        ("arithmetic", {"answer": "twelve"}, "'twelve'; expected a number or an expression"),
        ("countdown", {"numbers": [3, "5"], "target": 22}, "expected whole numbers"),
        ("countdown", {"numbers": [3, True], "target": 22}, "expected whole numbers"),
        ("countdown", {"numbers": [], "target": 22}, "expected whole numbers"),
    ],
)
def test_rows_that_a_verifier_cannot_judge_are_refused(name, values, message):
    with pytest.raises(DatasetError, match=message):
        make_verifier(name, None, timeout_s=1.0).check(Row("data.jsonl, line 7", values))
