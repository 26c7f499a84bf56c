"""Configurations in TOML: tables that are checked, and words for what is wrong in them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foreroute.errors import ConfigError
from foreroute.files import read_text

MOST = 999_999
"""Most of what is counted: steps, whose numbers have six digits in file names; sequences, which are kept in lists."""
MOST_TOKENS = 1 << 24
"""Most tokens of a sequence or a batch; the longest contexts have about 10 million."""
MOST_SECONDS = 604_800.0
"""A week, the longest wait. Far beyond, the system refuses to wait."""
MOST_EP = MOST_THREADS = 1024
"""Ranks that the experts of a layer are spread over, of which the largest deployments have about 300; threads of a
process, of which libraries cannot start many more."""
MOST_FLOAT = 1e30
"""The largest number that is handed to float32, which ends at 3e38."""
Count = Annotated[int, Field(ge=1, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Ranks = Annotated[int, Field(ge=1, le=MOST_EP)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Slots = Annotated[int, Field(ge=0, le=1024)]
Positive = Annotated[float, Field(gt=0, le=MOST_FLOAT)]
NotNegative = Annotated[float, Field(ge=0, le=MOST_FLOAT)]
Timeout = Annotated[float, Field(gt=0, le=MOST_SECONDS)]

MOST_BYTES, MOST_DOTS, DEEPEST = 1 << 16, 1000, 32
"""Limits of a file: bytes, dots in a line, depth of tables. tomllib takes seconds for a key of thousands of parts."""
MOST_PROBLEMS, MOST_LINE = 20, 2000
"""Limits of a message: problems that it lists, and characters of each."""


class Section(BaseModel):
    """A table of a configuration. Unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def refuse_unused(self, names: Iterable[str], why: str) -> None:
        """Refuse keys that change nothing beside others, so that nobody waits for what they asked for.

        A default may be written down: the resolved configuration of a run is a configuration.

        Args:
            names: of the keys.
            why: what they are not looked at for, and what to do, in words that follow "change nothing".

        Raises:
            ValueError: naming those that have another value than their default.
        """
        fields = type(self).model_fields
        unused = [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if unused:
            raise ValueError(f"{', '.join(unused)} {'change' if len(unused) > 1 else 'changes'} nothing {why}")


Config = TypeVar("Config", bound=Section)


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a file.

    Raises:
        ConfigError: when there is none, it is not TOML, or no configuration can have what is in it.
    """
    text = read_text(path, ConfigError, most_bytes=MOST_BYTES)
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MOST_DOTS:
            raise ConfigError(f"{path}: line {number} has {line.count('.')} dots; expected {MOST_DOTS} at most")
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # also for an integer of thousands of digits
        raise ConfigError(f"{path} is not a readable TOML file: {error!s:.400}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not a readable TOML file: it is nested too deep") from error
    _refuse_impossible(values, str(path))
    return values


def checked(
    kind: type[Config], values: Any, *, source: str, what: str = "configuration", within: str | None = None
) -> Config:
    """Values as what they are to be.

    Args:
        kind: a table, of tables or of values.
        values: as read.
        source: where they came from, for errors.
        what: the whole is, for errors.
        within: the name of the table, for one of a larger whole.

    Raises:
        ConfigError: naming every unknown key (with the nearest known one), wrong type and conflict.
    """
    _refuse_impossible(values, source)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [_describe(problem, kind, within) for problem in error.errors()]
        raise ConfigError(invalid(source, what, problems)) from error


def invalid(source: str, what: str, problems: Iterable[str]) -> str:
    """The message for all problems, or the first of many."""
    lines = list(problems)
    more = [f"and {len(lines) - MOST_PROBLEMS} more"] if len(lines) > MOST_PROBLEMS else []
    shown = [line[:MOST_LINE] for line in [*lines[:MOST_PROBLEMS], *more]]
    return f"{source} is not a valid {what}:\n" + "\n".join(f"  {line}" for line in shown)


def unknown_key(key: str, name: str, known: Sequence[str]) -> str:
    """The words for the key `name`, written `key` in full, where others are known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"{key}: unknown key; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")


def _describe(problem: Any, kind: type[BaseModel], within: str | None) -> str:
    location = problem["loc"]
    key = ".".join(str(part)[:80] for part in (within, *location) if part is not None)
    if problem["type"] == "extra_forbidden":
        return unknown_key(key, str(location[-1]), _known_keys(kind, location[:-1]))
    if problem["type"] == "missing":
        return f"{key}: required and not given"
    seen = "" if problem["type"] == "value_error" else f" (got {problem['input']!r:.80})"
    return f"{key + ': ' if key else ''}{problem['msg']}{seen}"


def _refuse_impossible(values: Any, source: str) -> None:
    """Refuse what no configuration can have, and what tools behind would fail on without a word about it."""
    waiting = [("", 0, values)]
    while waiting:
        key, depth, value = waiting.pop()
        if depth > DEEPEST:
            raise ConfigError(f"{source}: {key[:80]} is nested more than {DEEPEST} deep")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"{source}: {key[:80]}: an integer of more than 64 bits")
        if isinstance(value, str) and "\0" in value:
            raise ConfigError(f"{source}: {key[:80]}: text with a NUL character")
        if isinstance(value, dict):
            waiting += [(f"{key}.{name}" if key else str(name), depth + 1, inner) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, depth + 1, inner) for inner in value]


def _known_keys(kind: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for part in location:
        annotation = kind.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    return list(kind.model_fields)
