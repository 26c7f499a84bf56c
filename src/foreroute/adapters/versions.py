"""Which releases of other projects the adapters work with: the one table, which docs/where.md repeats.

An adapter looks at the versions before it imports anything else of its peer: an older release lacks what it stands on,
and would fail by an import error that names neither. An engine in another process is asked for its version before it is
asked for anything else. Nothing is imported here but what is looked at: vLLM's worker needs this module too, in an
environment without the others.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from foreroute.errors import AttachError, EngineError


@dataclass(frozen=True)
class Peer:
    """What is known of a package that is imported here, or of an engine that runs elsewhere.

    Attributes:
        module: the one that states the version of the code that runs; None of an engine, which is asked for it.
        lowest: older ones are refused.
        newest: the newest one that was tested; newer ones give a warning.
    """

    module: str | None
    lowest: str
    newest: str


PEERS = {
    "torch": Peer("torch", "2.10", "2.13.0"),
    "transformers": Peer("transformers", "5.3", "5.24.0"),
    "megatron-core": Peer("megatron.core", "0.16.1", "0.19.2"),
    "trl": Peer("trl", "1.6.0", "1.16.0"),
    "verl": Peer("verl", "0.9.1", "0.9.1"),
    "mbridge": Peer("mbridge", "0.15.1", "0.15.1"),
    # tests/engines/releases/README.md has what each release answered
    "vLLM": Peer(None, "0.28", "0.32.0"),
    # before, the ids of its routes are physical slots
    "SGLang": Peer(None, "0.5.10", "0.5.23"),
}


def require_peers(*packages: str) -> None:
    """Look at the versions of these packages, once in a process.

    Raises:
        AttachError: when one does not work with this foreroute.
        ModuleNotFoundError: when one is not installed.
    """
    for package in packages:
        _require_installed(package)


def require_engine(name: str, found: str) -> None:
    """Look at the version of an engine in another process.

    Args:
        name: of the engine.
        found: its version, as it states it.

    Raises:
        EngineError: when it does not work with this foreroute.
    """
    _require(name, found, EngineError)


@cache
def _require_installed(package: str) -> None:
    module = PEERS[package].module
    assert module is not None, f"{package} is not imported here"
    _require(package, str(getattr(import_module(module), "__version__", None)), AttachError)


def _require(name: str, found: str, error: type[AttachError | EngineError]) -> None:
    """Refuse a version that is known not to work, and warn of one that nobody has tried."""
    peer = PEERS[name]
    version = _numbers(found)
    if version is None:
        warnings.warn(
            f"{name} states the version {found!r:.40}, which has no number; foreroute needs {peer.lowest} or newer, "
            f"and was tested with {peer.newest}",
            stacklevel=4,
        )
    elif version < _known(peer.lowest):
        raise error(
            f"{name} {found:.40} does not work with this foreroute, which needs {peer.lowest} or newer; "
            f"install {peer.newest}, the newest that was tested, or another of these"
        )
    elif version > _known(peer.newest):
        warnings.warn(
            f"{name} {found:.40} is newer than {peer.newest}, the newest that foreroute was tested with; if something "
            f"fails, try {peer.newest} first",
            stacklevel=4,
        )


def _numbers(version: str) -> tuple[int, ...] | None:
    """The release, without zeros at its end; what marks builds and candidates is left out. None where there is none."""
    found = re.match(r"v?(\d{1,9}(?:\.\d{1,9})+)", version)
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _known(version: str) -> tuple[int, ...]:
    numbers = _numbers(version)
    assert numbers is not None, f"{version!r} is no version"
    return numbers


def at_least(found: str, lowest: str) -> bool:
    """Whether a stated version is this one or newer. One without a number is taken for the newest."""
    version = _numbers(found)
    return version is None or version >= _known(lowest)
