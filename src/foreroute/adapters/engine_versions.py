"""Versions of engines in other processes, compared with those that adapters were written for. Needs no framework."""

from __future__ import annotations

import re
import warnings

from foreroute.errors import EngineError

_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def require_engine(name: str, found: str, *, least: str, below: str | None = None, tested: str) -> None:
    """Refuse an engine of a version that is known not to work, and warn of one that nobody has tried.

    Args:
        name: of the engine.
        found: its version, as it states it; what follows the third number is not looked at.
        least: the first version that works.
        below: the first one that does not any more, if that is known.
        tested: the newest that was tested.

    Raises:
        EngineError: when it is older than `least`, or not below `below`.
    """
    number = _numbers(found)
    works = f"{least} or newer" if below is None else f"from {least} on and below {below}"
    if number is None:
        warnings.warn(
            f"{name} states the version {found!r:.40}, which has no number; foreroute needs one {works}, and was "
            f"tested with {tested}",
            stacklevel=3,
        )
    elif number < _known(least) or (below is not None and number >= _known(below)):
        raise EngineError(
            f"{name} {found:.40} does not work with this foreroute, which needs a version {works}; install {tested}"
        )
    elif below is None and number > _known(tested):
        warnings.warn(
            f"{name} {found:.40} is newer than {tested}, the newest that this foreroute was tested with", stacklevel=3
        )


def _numbers(version: str) -> tuple[int, ...] | None:
    match = _NUMBERS.match(version)
    return match and tuple(int(number or 0) for number in match.groups())


def _known(version: str) -> tuple[int, ...]:
    numbers = _numbers(version)
    assert numbers is not None, f"{version!r} is no version"
    return numbers
