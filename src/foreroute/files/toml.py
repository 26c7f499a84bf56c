"""Reads TOML files within limits, and finds words for a key that nobody knows. No pydantic."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreroute.errors import ConfigError
from foreroute.files.regular import it_is, read_text

MOST_BYTES, MOST_DOTS, DEEPEST = 1 << 16, 1000, 32
"""Limits of a file: bytes, dots in a line, depth of tables. tomllib takes seconds for a key of thousands of parts."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a file that a configuration can have; `ConfigError` says why there are none."""
    text = read_text(path, ConfigError, most_bytes=MOST_BYTES)
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MOST_DOTS:
            raise ConfigError(f"{path}: line {number} has {line.count('.')} dots; expected {MOST_DOTS} at most")
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # also for an integer of thousands of digits
        what = it_is(text.encode(), "TOML", "text")
        raise ConfigError(f"{path} is not a readable TOML file ({error!s:.400}){what}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not a readable TOML file: it is nested too deep") from error
    refuse_impossible(values, str(path))
    return values


def refuse_impossible(values: Any, source: str) -> None:
    """Refuse what no configuration can have, and what later tools would fail on without naming it."""
    waiting = [("", 0, values)]
    while waiting:
        key, depth, value = waiting.pop()
        if depth > DEEPEST:
            raise ConfigError(f"{source}: {key[:80]} is nested more than {DEEPEST} deep")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"{source}: {key[:80]}: an integer of more than 64 bits")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            raise ConfigError(f"{source}: {key[:80]}: text with a NUL character, or half of a character")
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{name}" if key else str(name), depth + 1, inner) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, depth + 1, inner) for inner in value]


def by_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten tables within tables: values by their whole key; an empty table is a value, and not nothing."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= by_key(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return flat


def unknown_key(key: str, name: str, known: Sequence[str]) -> str:
    """Say that the key `name`, written `key` in full, is unknown, with the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"{key[:400]}: unknown key; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")
