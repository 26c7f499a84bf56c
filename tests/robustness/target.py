"""A reader of what others wrote, and the verdict on one malformed input."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreroute.errors import ForerouteError
from tests.robustness.mutations import damage

FAILURES = ("crash", "hang", "accepted wrong", "traceback", "names no file")
"""Verdicts that must not be. The others are refused, same, and plausible: another content that follows every rule."""


@dataclass(frozen=True)
class Target:
    """A reader of bytes from outside.

    Attributes:
        read: what is tried; raises `ForerouteError` for what it refuses. Takes the bytes, or the path of `file`.
        forge: a malformed input that an attacker makes with this library: right checksums, or right syntax.
        check: raises when a value breaks a rule of the format, written out anew: no check of the reader's is asked.
        has_checksum: whether damage must be refused, with the name of the file, or leave the content as it was.
        weight: share of the inputs, relative to the others.
    """

    name: str
    make: Callable[[np.random.Generator], bytes]
    read: Callable[[Any], Any]
    file: Path | None = None
    forge: Callable[[bytes, np.random.Generator], bytes] | None = None
    check: Callable[[bytes, Any], None] | None = None
    has_checksum: bool = False
    weight: int = 1

    def malformed(self, valid, case, rng):
        """An input, and whether it is forged, as every second one is where it can be."""
        forged = self.forge is not None and case % 2 == 1
        return self.forge(valid, rng) if forged else damage(valid, rng), forged

    def content(self, raw):
        """What the reader makes of an input, to be compared."""
        return bits(self._value(raw))

    def judge(self, raw, expected, *, forged):
        """Read one input. Returns the verdict, and for failures what was seen."""
        try:
            value = self._value(raw)
        except ForerouteError as error:
            unnamed = self.file is not None and self.has_checksum and not forged and self.file.name not in str(error)
            return ("names no file", str(error)[:200]) if unnamed else ("refused", "")
        except Exception as error:
            return "traceback", f"{type(error).__name__}: {error}"[:200]
        if bits(value) == expected:
            return "same", ""
        if self.check is None or (self.has_checksum and not forged):
            return "accepted wrong", "other content than the original"
        try:
            self.check(raw, value)
        except Exception as error:
            return "accepted wrong", f"{type(error).__name__}: {error}"[:200]
        return "plausible", ""

    def _value(self, raw):
        if self.file is None:
            return self.read(raw)
        self.file.write_bytes(raw)
        return self.read(self.file)


def load_group(name, folder):
    """The targets of `module:function`, which share what they import; the function takes a folder for their files."""
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)(folder)


def bits(value):
    """Something that == compares to the bit, types and shapes included; the order of a mapping says nothing."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        whole = value.contiguous().reshape(-1).view(sys.modules["torch"].uint8)
        return str(value.dtype), tuple(value.shape), whole.numpy().tobytes()
    if is_dataclass(value):
        return type(value).__name__, [(field.name, bits(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, Mapping):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(each) for each in value]
    return type(value).__name__, repr(value)
