"""Releases of other projects that the adapters work with: the one table, which docs/where.md repeats.

An adapter checks versions before it imports anything else of its peer: an older release lacks what it stands on, and
would fail by an import error that names neither. Nothing heavy is imported here: vLLM's worker imports this module too,
in an environment of its own.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from typing import NamedTuple

from packaging.version import InvalidVersion, Version

from foreroute.errors import AttachError, EngineError


class Peer(NamedTuple):
    """A package that is imported here, or an engine that runs elsewhere, and its releases."""

    module: str | None  # states the version of the code that runs; None for an engine, which is asked for it
    lowest: str  # older ones are refused
    newest: str  # the newest one that was tested; newer ones give a warning


PEERS = {
    "torch": Peer("torch", "2.10", "2.13.0"),
    "transformers": Peer("transformers", "5.3", "5.24.0"),
    "megatron-core": Peer("megatron.core", "0.16.1", "0.19.2"),
    "trl": Peer("trl", "1.6.0", "1.16.0"),
    "verl": Peer("verl", "0.9.1", "0.9.1"),
    "mbridge": Peer("mbridge", "0.15.1", "0.15.1"),
    # tests/engines/releases/README.md has what each release answered
    "vLLM": Peer(None, "0.28", "0.32.0"),
    # older ones return ids of physical experts
    "SGLang": Peer(None, "0.5.10", "0.5.23"),
}
MOST_CHARACTERS = 100
"""Characters of a server's statement that are read."""


def require_peers(*packages: str) -> None:
    """Check the versions of these packages, once in a process.

    Raises:
        AttachError: when one does not work with this foreroute.
        ModuleNotFoundError: when one is not installed.
    """
    for package in packages:
        _require_installed(package)


def require_engine(name: str, found: str) -> None:
    """Check the version that an engine in another process states; raise `EngineError` when it does not work."""
    _require(name, found, EngineError)


def at_least(found: str, lowest: str) -> bool:
    """Tell whether a stated version is this one or newer. One that is no version is taken for the newest."""
    version = _release(found)
    return version is None or version >= Version(lowest)


@cache
def _require_installed(package: str) -> None:
    module = PEERS[package].module
    assert module is not None, f"{package} is not imported here"
    _require(package, str(getattr(import_module(module), "__version__", None)), AttachError)


def _require(name: str, found: str, error: type[AttachError | EngineError]) -> None:
    """Refuse a version that is known not to work, and warn of one that is newer than all that were tested."""
    peer, version = PEERS[name], _release(found)
    if version is None:
        warnings.warn(
            f"{name} states the version {found!r:.40}, which has no number; foreroute needs {peer.lowest} or "
            f"newer, and was tested with {peer.newest}",
            stacklevel=4,
        )
    elif version < Version(peer.lowest):
        raise error(
            f"{name} {found:.40} does not work with this foreroute, which needs {peer.lowest} or newer; "
            f"install {peer.newest}, the newest that was tested, or another of these"
        )
    elif version > Version(peer.newest):
        warnings.warn(
            f"{name} {found:.40} is newer than {peer.newest}, the newest that foreroute was tested with; if something "
            f"fails, try {peer.newest} first",
            stacklevel=4,
        )


def _release(version: str) -> Version | None:
    """Return the release of a version, without what marks builds, candidates and posts; None for what is no version."""
    # what a server states may be anything: Python refuses numbers of thousands of digits, and "1" alone is no release
    try:
        release = Version(Version(version[:MOST_CHARACTERS]).base_version)
    except InvalidVersion:
        return None
    return release if len(release.release) > 1 else None
