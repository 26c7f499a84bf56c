"""Which releases of other projects the adapters work with: the one table, which the documentation repeats.

An adapter looks at the versions before it imports anything else of its peer: an older release lacks what it stands on,
and would fail by an import error that names neither.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from foreroute.errors import AttachError


@dataclass(frozen=True)
class Peer:
    """What is known of a package.

    Attributes:
        module: the one that states the version of the code that runs.
        lowest: older ones are refused.
        newest: the newest one that the tests ran with; newer ones give a warning.
    """

    module: str
    lowest: str
    newest: str


PEERS = {
    "torch": Peer("torch", "2.10", "2.13.0"),
    # from 5.14 on for every family of docs/adapters.md; older ones for those of docs/verl.md, since verl pins them
    "transformers": Peer("transformers", "5.10.4", "5.23.0"),
    "megatron-core": Peer("megatron.core", "0.16.1", "0.19.2"),
    "trl": Peer("trl", "1.16.0", "1.16.0"),
    "verl": Peer("verl", "0.9.1", "0.9.1"),
}


def require_peers(*packages: str) -> None:
    """Look at the versions of these packages.

    Raises:
        AttachError: when one is too old.
        ModuleNotFoundError: when one is not installed.
    """
    for package in packages:
        _require_peer(package)


@cache
def _require_peer(package: str) -> None:
    """Refuses, or warns, once in a process."""
    peer = PEERS[package]
    stated = getattr(import_module(peer.module), "__version__", None)
    version = _numbers(str(stated))
    if not version:  # a build that states none: what it lacks is seen when it is used
        return
    if version < _numbers(peer.lowest):
        raise AttachError(
            f"{package} {stated} is installed; foreroute works with {peer.lowest} or newer and was tested up to "
            f"{peer.newest}. Install one of these"
        )
    if version > _numbers(peer.newest):
        warnings.warn(
            f"{package} {stated} is newer than {peer.newest}, the newest that foreroute was tested with; if something "
            f"fails, try {package}=={peer.newest} first",
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The release, without zeros at its end; what marks builds and candidates is left out."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
