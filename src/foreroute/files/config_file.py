"""Reads TOML values into pydantic models, and turns validation errors into readable messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foreroute.errors import ConfigError, shown
from foreroute.files.toml import refuse_impossible, unknown_key

MOST_COUNTED = 999_999
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
Count = Annotated[int, Field(ge=1, le=MOST_COUNTED)]
Natural = Annotated[int, Field(ge=0, le=MOST_COUNTED)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Ranks = Annotated[int, Field(ge=1, le=MOST_EP)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Slots = Annotated[int, Field(ge=0, le=1024)]
Positive = Annotated[float, Field(gt=0, le=MOST_FLOAT)]
NotNegative = Annotated[float, Field(ge=0, le=MOST_FLOAT)]
Timeout = Annotated[float, Field(gt=0, le=MOST_SECONDS)]

MOST_PROBLEMS, MOST_LINE = 20, 2000
"""Limits of a message: problems that it lists, and characters of each."""


class Section(BaseModel):
    """A table of a configuration. Unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def refuse_unused(self, names: Iterable[str], why: str) -> None:
        """Refuse keys that change nothing beside others, so that nobody waits for what they asked for.

        Args:
            names: of the keys; a default may be written down, as in the resolved configuration of a run.
            why: the reason and the remedy, in words that follow "change nothing".
        """
        fields = type(self).model_fields
        unused = [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]
        if unused:
            raise ValueError(f"{', '.join(unused)} {'change' if len(unused) > 1 else 'changes'} nothing {why}")


Config = TypeVar("Config", bound=Section)


def checked(table: type[Config], values: Any, *, source: str) -> Config:
    """Return values as a `table` of theirs, or raise `ConfigError` with every unknown key, wrong type and conflict."""
    refuse_impossible(values, source)
    try:
        return table.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
        lines = [f"  {_describe(problem, table)}"[: MOST_LINE + 2] for problem in problems[:MOST_PROBLEMS]]
        if (more := len(problems) - MOST_PROBLEMS) > 0:
            lines.append(f"  and {more} more")
        raise ConfigError("\n".join([f"{source} is not valid:", *lines])) from error


def _describe(problem: Any, table: type[BaseModel]) -> str:
    """Say what is wrong with one key."""
    location = problem["loc"]
    key = ".".join(str(part)[:80] for part in location)
    if problem["type"] == "extra_forbidden":
        return unknown_key(key, str(location[-1]), _known_keys(table, location[:-1]))
    if problem["type"] == "missing":
        return f"{key}: required and not given"
    seen = "" if problem["type"] == "value_error" else f" (got {shown(problem['input'])})"
    return f"{key + ': ' if key else ''}{problem['msg'].removeprefix('Value error, ')}{seen}"


def _known_keys(table: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """List the keys of the table at a location."""
    for part in location:
        annotation = table.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        table = annotation
    return list(table.model_fields)
