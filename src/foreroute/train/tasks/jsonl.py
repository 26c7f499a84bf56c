"""A data set: one JSON object in each line of a file, every line checked before the first step.

{"prompt": "What is 3 * 4?", "answer": "12"}
{"messages": [{"role": "user", "content": "What is 3 * 4?"}], "answer": 12}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from foreroute.errors import DatasetError


@dataclass(frozen=True)
class Row:
    """One line of a data set.

    Attributes:
        where: file and line, for messages.
        values: the object, "answer" as text where it was a number.
    """

    where: str
    values: dict[str, Any]

    @property
    def answer(self) -> str | None:
        """The right answer, where there is one."""
        return self.values.get("answer")

    def refuse(self, seen: str, expected: str) -> NoReturn:
        """Raise `DatasetError`."""
        raise DatasetError(f"{self.where}: {seen}; expected {expected}")


def parse_rows(content: bytes, name: str, check: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Read and check all lines of a file.

    Args:
        content: JSONL in UTF-8.
        name: of the file, for messages.
        check: what else a row must have; it refuses those that lack it.

    Raises:
        DatasetError: naming the file, the line, what was seen and what was expected.
    """
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise DatasetError(f"{name} is empty; expected one JSON object in each line")
    rows = [_row(f"{name}, line {number}", line) for number, line in enumerate(lines, 1)]
    for row in rows:
        check(row)
    return rows


def _row(where: str, line: bytes) -> Row:
    try:
        values = json.loads(line.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number)
        # only an escape can be half a character: as bytes it would not be UTF-8
        if b"\\u" in line:
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DatasetError(f"{where}: {half!r} is half a character (a lone surrogate); expected text") from error
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: {_shown(line.decode(errors='replace'))} is not JSON ({error!s:.200})") from error
    row = Row(where, values)
    if not isinstance(values, dict):
        row.refuse(f"a {_kind(values)}", 'an object such as {"prompt": "…", "answer": "…"}')
    if ("prompt" in values) == ("messages" in values):
        both = "both" if "prompt" in values else "neither"
        keys = ", ".join(values)[:80] or "none"
        row.refuse(f'{both} of "prompt" and "messages" (keys: {keys})', "one of the two")
    if "prompt" in values and not (isinstance(values["prompt"], str) and values["prompt"]):
        row.refuse(f'"prompt" is {_shown(values["prompt"])}', "text")
    if "messages" in values:
        _check_messages(row, values["messages"])
    if "answer" in values:
        answer = values["answer"]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            row.refuse(f'"answer" is {_shown(answer)}', "text or a number")
        if isinstance(answer, float) and not math.isfinite(answer):
            row.refuse('"answer" is a number beyond the range of floats', "text or a number")
        values["answer"] = str(answer)
    return row


def _check_messages(row: Row, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        row.refuse(f'"messages" is {_shown(messages)}', "a list of messages")
    for number, message in enumerate(messages, 1):
        keys = set(message) if isinstance(message, dict) else None
        if keys != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            row.refuse(f"message {number} is {_shown(message)}", '{"role": "…", "content": "…"}, both text')


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f'key "{name}" is there twice')
        values[name] = value
    return values


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _kind(value: Any) -> str:
    kinds = {list: "list", str: "text", bool: "truth value", int: "number", float: "number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text if len(text) <= 60 else text[:60] + "…")
