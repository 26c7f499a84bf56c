"""Arguments of sessions, checked before anything of a model is touched: the same rules in every framework."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from foreroute.checks import MOST_INT32, whole_number
from foreroute.errors import BatchMismatchError, ConfigError, LayoutError, StaleTraceError, TraceError
from foreroute.layout import Layout
from foreroute.trace import NO_VERSION, RoutingTrace

SHOWN_VERSIONS = 8
WANTED_MASK = "expected [batch, tokens], 1 for tokens and 0 for padding"


def not_of_class(argument: str, value: object, wanted: str) -> TraceError:
    """Make the error of a value that is of none of the classes that were wanted."""
    what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    return TraceError(f"{argument} is {what}; expected {wanted}")


def require_switches(**switches: object) -> None:
    """Raise `ConfigError` unless these arguments are True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool | np.bool_):
            raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}; expected True or False")


def require_choice(argument: str, value: object, choices: Any) -> None:
    """Raise `ConfigError` unless an argument is one of the strings that a `Literal` names."""
    if not (isinstance(value, str) and value in get_args(choices)):
        raise ConfigError(f"{argument} is {value!r}; expected one of {', '.join(map(repr, get_args(choices)))}")


def as_version(value: object) -> int:
    """Give the version that a recording stamps on its rows. Raises `ConfigError` for what is none."""
    return whole_number(value, name="weight_version", least=NO_VERSION, most=MOST_INT32, error=ConfigError)


def require_version(versions: tuple[int, ...], expected: int | Collection[int], what: str) -> None:
    """Raise `StaleTraceError` unless every routed row was recorded under an expected version.

    A range accepts no row whose version is not stated. Raises `ConfigError` for what is no version, nor several.
    """
    accepted = _accepted(expected)
    stated = isinstance(accepted, range)  # its numbers are steps, which may reach below 0 at the start of a run
    if not versions or not all(v in accepted and not (stated and v == NO_VERSION) for v in versions):
        remedy = "Replay the trace of the rollout that this update belongs to"
        if NO_VERSION in versions:
            remedy = (
                "Name the weights where the trace is made: weight_version=, or --weight-version of foreroute convert"
            )
        raise StaleTraceError(
            f"{what} was recorded under weight versions {list(versions)}, expected only {_shown(accepted)} "
            f"({NO_VERSION} means not stated). {remedy}"
        )


def require_layout(layout: object, trace: RoutingTrace) -> None:
    """Raise `LayoutError` for what is no layout, and `BatchMismatchError` for one of other rows than a trace has."""
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"layout is a {type(layout).__name__}; expected one of foreroute.layout, of pad(...) or pack(...)"
        )
    if layout.num_rows != trace.num_rows:
        raise BatchMismatchError(
            f"the layout is for {layout.num_rows} packed rows and the trace has {trace.num_rows}; lay out trace.lengths"
        )


def kept_by(mask: NDArray[Any]) -> NDArray[np.bool_]:
    """Say what an attention mask keeps, bool. Raises `BatchMismatchError` for what is no such mask."""
    kept = np.asarray(mask == 1)
    strange = ~kept & (mask != 0)
    if strange.any():
        raise BatchMismatchError(
            f"attention_mask holds {mask[strange][0]:g}; {WANTED_MASK}. Numbers of segments and weights of tokens do "
            "not say which tokens are padding"
        )
    return kept


def _accepted(expected: Any) -> Collection[int]:
    if isinstance(expected, range) and expected and max(expected[0], expected[-1]) >= 0:
        return expected
    listed = expected.tolist() if hasattr(expected, "tolist") else expected  # of numpy and torch
    is_one = isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Collection) or not listed
    return [as_version(each) for each in ([listed] if is_one else listed)]


def _shown(accepted: Collection[int]) -> str:
    if isinstance(accepted, range):  # which may be longer than any list
        ends = sorted((accepted[0], accepted[-1]))
        few = [v for v in islice(accepted, SHOWN_VERSIONS + 1) if v >= 0]
        return f"those from {max(ends[0], 0)} to {ends[1]}" if len(few) > SHOWN_VERSIONS else _shown(few)
    numbers = sorted(accepted)
    more = f" and {len(numbers) - SHOWN_VERSIONS} more" if len(numbers) > SHOWN_VERSIONS else ""
    return ", ".join(map(str, numbers[:SHOWN_VERSIONS])) + more
