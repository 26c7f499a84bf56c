"""The value of an arithmetic expression, exactly, and without running anything."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

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
    """The value of `+ - * /`, parentheses, whole and decimal numbers; None where that is not what `expression` is."""
    tree = parsed(expression)
    try:
        return None if tree is None else _value(tree, expression.strip())
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


def whole_numbers(expression: str) -> list[int] | None:
    """The numbers in an expression, in their order; None where one is not whole, or it is no expression."""
    tree = parsed(expression)
    if tree is None:
        return None
    numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return numbers if all(type(number) is int for number in numbers) else None  # type: ignore[return-value]


def parsed(expression: str) -> ast.expr | None:
    """The syntax tree, or None."""
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
