"""Records as JSON objects: one reader, which checks every value against the type of its field, and one writer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from foreroute.errors import InputError, few, shown

Value = TypeVar("Value")

KEYS = {"f1_5": "f1.5"}
"""Keys that cannot be names of fields, by the field."""
HALF_CHARACTER = re.compile("[\\ud800-\\udfff]")
"""What JSON can name and UTF-8 cannot."""
ROUNDED = 1e-6
"""Rounding lets a quotient of sums end so far outside of its bounds."""
EXPECTED = {int: "an integer of 64 bits", float: "a number", str: "text", list: "a list", dict: "an object"}


def to_json(record: Any) -> dict[str, Any]:
    """Return a record, and the records in it, as plain values by key; what was not recorded has no key."""
    return asdict(record, dict_factory=lambda pairs: {KEYS.get(k, k): value for k, value in pairs if value is not None})


def by_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten tables within tables: values by their whole key; an empty table is a value, and not nothing."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= by_key(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return flat


def from_json(
    # a dataclass whose fields are numbers, texts, literals, lists, dictionaries and such records
    record_type: type[Value],
    values: object,  # what JSON had
    # raised with the key, for one that is missing or unknown, and for a value of another type or outside of its bounds,
    # or that a check of the record refuses
    error: type[InputError],
    at: str = "",  # the key of the values, for errors; empty at the top
) -> Value:
    """Make a record of the value of a JSON text, in which NaN and infinities are numbers, and True is not."""
    record, given = cast(Any, record_type), cast(dict[str, Any], value_of(dict, values, error, at))
    of_key = {KEYS.get(field.name, field.name): field for field in fields(record)}
    needed = {key for key, field in of_key.items() if field.default is MISSING and field.default_factory is MISSING}
    # all keys at once: who writes such lines mends them in one go
    if missing := needed - given.keys():
        raise error(f"{_named(at)} lacks {few(missing)}")
    if unknown := given.keys() - of_key.keys():
        raise error(f"{_named(at)} has the unknown keys {few(unknown)}; expected no other than {few(of_key)}")
    hints, prefix = _hints(record), f"{at}." if at else ""
    found = {
        of_key[key].name: value_of(hints[of_key[key].name], each, error, prefix + key) for key, each in given.items()
    }
    try:
        return record_type(**found)
    except ValueError as cause:
        raise error(f"{_named(at)}: {cause}") from cause


def value_of(hint: Any, value: Any, error: type[InputError], at: str) -> Any:
    """Return the value of a JSON text as one of the type `hint`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):  # with None
        return None if value is None else value_of(arguments[0], value, error, at)
    if origin is Annotated:  # with bounds, outside of which NaN is not
        found, (low, high) = value_of(arguments[0], value, error, at), arguments[1]
        if found < low - ROUNDED or found > high + ROUNDED:
            raise error(f"{at} is {shown(found)}; expected a number from {low} to {high}")
        return found
    if origin is Literal:
        if value not in arguments:
            raise error(f"{_named(at)} is {shown(value)}; expected one of {few(arguments)}")
        return value
    if origin is dict:
        key_hint, value_hint = arguments
        return {
            value_of(key_hint, key, error, f"{at}.{key}"): value_of(value_hint, each, error, f"{at}.{key}")
            for key, each in value_of(dict, value, error, at).items()
        }
    if origin is list:
        # thousands of numbers are looked at together
        if set(map(type, value_of(list, value, error, at))) == {arguments[0]}:
            return value
        return [value_of(arguments[0], each, error, f"{at}.{n}") for n, each in enumerate(value)]
    if is_dataclass(hint):
        return from_json(cast(Any, hint), value, error, at)
    fits = type(value) is hint and not (hint is str and HALF_CHARACTER.search(value))
    if type(value) is int:  # True is one of another type, and a whole number may stand for a float
        fits = hint in (int, float) and -(2**63) <= value < 2**63
    if not fits:
        raise error(f"{_named(at)} is {shown(value)}; expected {EXPECTED[hint]}")
    return value


def _named(at: str) -> str:
    """Name a key in an error; the whole value has none."""
    return at or "it"


@cache  # resolving annotations takes longer than reading a line
def _hints(record_type: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    return get_type_hints(record_type, include_extras=True)
