"""What configurations in TOML have in common: tables that are checked, and words for what is wrong in them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foreroute.errors import ConfigError
from foreroute.files import read_text

Count = Annotated[int, Field(ge=1)]
MOST_BYTES = 16 << 20
"""Of a configuration, which is written by hand; a larger file is something else."""


class Section(BaseModel):
    """A table of a configuration. Unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Config = TypeVar("Config", bound=Section)


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a file.

    Raises:
        ConfigError: when there is none, or it is not TOML.
    """
    text = read_text(path, ConfigError, most_bytes=MOST_BYTES)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a readable TOML file: {error}") from error


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
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [_describe(problem, kind, within) for problem in error.errors()]
        raise ConfigError(invalid(source, what, problems)) from error


def invalid(source: str, what: str, problems: Iterable[str]) -> str:
    """The message for all problems."""
    return f"{source} is not a valid {what}:\n" + "\n".join(f"  {problem}" for problem in problems)


def unknown_key(key: str, name: str, known: Sequence[str]) -> str:
    """The words for the key `name`, written `key` in full, where others are known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"{key}: unknown key; " + (f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}")


def _describe(problem: Any, kind: type[BaseModel], within: str | None) -> str:
    location = problem["loc"]
    key = ".".join(str(part) for part in (within, *location) if part is not None)
    if problem["type"] == "extra_forbidden":
        return unknown_key(key, str(location[-1]), _known_keys(kind, location[:-1]))
    if problem["type"] == "missing":
        return f"{key}: required and not given"
    seen = "" if problem["type"] == "value_error" else f" (got {problem['input']!r})"
    return f"{key + ': ' if key else ''}{problem['msg']}{seen}"


def _known_keys(kind: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    for part in location:
        annotation = kind.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        kind = annotation
    return list(kind.model_fields)
