"""The built-in rewards: 1 for a right response, 0 for a wrong one. What a row must have is checked beforehand."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from foreroute.errors import ConfigError, FunctionError
from foreroute.train.tasks import function_worker
from foreroute.train.tasks.function import UserFunction
from foreroute.train.tasks.jsonl import Row


@dataclass(frozen=True)
class Verifier:
    """A built-in reward: whether a response to a row is right.

    Attributes:
        check: refuses rows that it cannot judge responses to.
        is_right: whether a response to a row is right. That of a pattern raises `FunctionError` when it takes too long.
        close: ends what was started to judge. May be called again.
    """

    check: Callable[[Row], None]
    is_right: Callable[[Mapping[str, Any], str], bool]
    close: Callable[[], None] = lambda: None


def make_verifier(name: str, pattern: str | None, *, timeout_s: float) -> Verifier:
    """Make the verifier of that name; the caller closes it.

    Args:
        name: one of the built-in rewards.
        pattern: of "regex".
        timeout_s: how long the pattern may look for a match.

    Raises:
        ConfigError: when `pattern` is no regular expression.
    """
    if name == "regex":
        return _pattern_verifier(str(pattern), timeout_s)
    return {
        "exact_match": Verifier(_needs_answer, exact_match),
        "arithmetic": Verifier(_needs_value, arithmetic),
        "countdown": Verifier(_needs_numbers, countdown),
    }[name]


def exact_match(row: Mapping[str, Any], response: str) -> bool:
    """The response is the answer; white space around either does not matter."""
    return response.strip() == str(row["answer"]).strip()


def arithmetic(row: Mapping[str, Any], response: str) -> bool:
    """The end of the last line, behind "=" if there is one, is an expression of the answer's value."""
    value = evaluate(_last_line(response).rpartition("=")[2])
    return value is not None and value == evaluate(row["answer"])


def countdown(row: Mapping[str, Any], response: str) -> bool:
    """The last line, up to "=" if there is one, uses each of the row's "numbers" once and makes its "target"."""
    expression = _last_line(response).partition("=")[0]
    used = whole_numbers(expression)
    return used is not None and sorted(used) == sorted(row["numbers"]) and evaluate(expression) == row["target"]


def _pattern_verifier(pattern: str, timeout_s: float) -> Verifier:
    """The answer is what the last match of a pattern found, in a process that can be ended."""
    reference = f"{function_worker.__file__}:{function_worker.answered.__name__}"
    function = UserFunction(reference, label=f"task.pattern = {pattern[:80]!r}", timeout_s=timeout_s)

    def found(row: Mapping[str, Any], response: str) -> bool:
        return bool(function.number("", response, {"pattern": pattern, "answer": str(row["answer"])}))

    try:
        found({"answer": ""}, "")
    except FunctionError as error:
        function.close()
        why = str(error).partition(": ")[2] or str(error)
        raise ConfigError(f"task.pattern = {pattern[:80]!r} is no regular expression: {why}") from error
    return Verifier(_needs_answer, found, function.close)


def _last_line(response: str) -> str:
    lines = response.strip().splitlines()
    return lines[-1] if lines else ""


def _needs_answer(row: Row) -> None:
    if row.answer is None:
        row.refuse('no "answer"', "one, which this reward compares responses with")


def _needs_value(row: Row) -> None:
    _needs_answer(row)
    if evaluate(str(row.answer)) is None:
        row.refuse(f'"answer" is {row.answer!r}', "a number or an expression of + - * / and parentheses")


def _needs_numbers(row: Row) -> None:
    numbers, target = row.values.get("numbers"), row.values.get("target")
    whole = [*numbers, target] if isinstance(numbers, list) and numbers else [None]
    if not all(type(number) is int for number in whole):
        row.refuse(f'"numbers" is {numbers!r} and "target" {target!r}', "whole numbers, such as [3, 5, 7] and 22")


LONGEST = 1000
"""Characters of an expression that is looked at."""
_TEXT = re.compile(r"[\d\s.+\-*/()]+")
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> Fraction | None:
    """Compute `+ - * /` of whole and decimal numbers, exactly and without running anything; None for anything else."""
    tree = parsed(expression)
    try:
        return None if tree is None else _value(tree, expression.strip())
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


def whole_numbers(expression: str) -> list[int] | None:
    """Find the numbers in an expression, in their order; None where one is not whole, or it is no expression."""
    tree = parsed(expression)
    if tree is None:
        return None
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return numbers if all(type(number) is int for number in numbers) else None  # type: ignore[return-value]


def parsed(expression: str) -> ast.expr | None:
    """Parse an expression to its syntax tree, or None."""
    text = expression.strip()
    if len(text) > LONGEST or not _TEXT.fullmatch(text):
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):
        # as it is written: 0.1 is a tenth, which no float is
        return Fraction(ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left, text), _value(node.right, text))
    raise ValueError(f"{type(node).__name__} is no arithmetic")
