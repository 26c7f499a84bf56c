"""A reader under attack, and the verdict on one malformed input."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fuzzing.mutations import damage
from foreroute.errors import ForerouteError

Maker = Callable[[np.random.Generator], bytes]
Mutator = Callable[[bytes, np.random.Generator], bytes]
FORGED_EVERY = 2
"""Of a target that can be forged, every second input is a forgery; the other is damage."""


@dataclass(frozen=True)
class Target:
    """A reader of bytes from outside.

    Attributes:
        name: of the reader.
        make: a valid input.
        read: what is tried; raises `ForerouteError` for what it refuses.
        same: whether two values that were read are equal.
        forge: a malformed input that an attacker makes with this library: right checksums, or right syntax.
        check: given the bytes and the value, raises when the value breaks a rule of the format.
        has_checksum: whether damage must be refused or leave the content as it was.
        weight: share of the inputs, relative to the others.
    """

    name: str
    make: Maker
    read: Callable[[bytes], Any]
    same: Callable[[Any, Any], bool]
    forge: Mutator | None = None
    check: Callable[[bytes, Any], None] | None = None
    has_checksum: bool = False
    weight: float = 1.0

    def malformed(self, valid: bytes, case: int, rng: np.random.Generator) -> tuple[bytes, bool]:
        """An input, and whether it is forged."""
        if self.forge is not None and case % FORGED_EVERY:
            return self.forge(valid, rng), True
        return damage(valid, rng), False


def load_group(name: str, folder: Path) -> list[Target]:
    """The targets of a group, which share what they import, and a process.

    Args:
        name: `module:function`; the function takes a folder and returns targets.
        folder: where readers of files find theirs.
    """
    module, function = name.split(":")
    targets: list[Target] = getattr(importlib.import_module(module), function)(folder)
    return targets


class Verdict(StrEnum):
    """What a reader did with a malformed input; the last three are failures."""

    REFUSED = "refused"
    SAME = "same"
    PLAUSIBLE = "plausible"
    ACCEPTED_WRONG = "accepted_wrong"
    TRACEBACK = "traceback"
    MEMORY = "memory"


def judge(target: Target, raw: bytes, expected: Any, *, forged: bool) -> tuple[Verdict, str]:
    """Read one input. Returns what happened, and for failures what was seen."""
    try:
        value = target.read(raw)
    except ForerouteError:
        return Verdict.REFUSED, ""
    except Exception as error:
        return Verdict.TRACEBACK, f"{type(error).__name__}: {error}"[:200]
    if target.same(value, expected):
        return Verdict.SAME, ""
    if target.check is None or (target.has_checksum and not forged):
        return Verdict.ACCEPTED_WRONG, "other content than the original"
    try:
        target.check(raw, value)
    except Exception as error:
        return Verdict.ACCEPTED_WRONG, f"{type(error).__name__}: {error}"[:200]
    return Verdict.PLAUSIBLE, ""


def written(raw: bytes, path: Path) -> Path:
    """The path, with these bytes in it."""
    path.write_bytes(raw)
    return path
