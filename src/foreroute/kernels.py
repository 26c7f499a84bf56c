"""How loops are compiled, and how compiled ones are kept on disk.

numba keeps a compiled function until the file that it stands in changes. It looks at no other file, though it inlines
functions and constants of others; it takes no notice of how it is set to compile; and what a damaged cache file holds
is run. So kernels are kept here in files of our own: each is sealed, and names all that it was made from.

Whoever can write to such a file decides what runs here. Only files that this user or root owns, and that nobody else
may write, are read.
"""

from __future__ import annotations

import os
import pickle
import re
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numba
import numpy as np
from numba import types, uint64
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, NullCache
from numba.core.serialize import dumps

from foreroute.errors import InputError
from foreroute.files import RegularFile, write_atomically

F = TypeVar("F", bound=Callable[..., Any])
_PART = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
PACKAGE = Path(__file__).parent
_IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)(?:\s+import\s+(\([^)]*\)|[^\n]*))?", re.MULTILINE)
_SEAL_BYTES = sha256().digest_size


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compile on first use, and again when a file that it takes code or constants from has changed.

    A decorator, with or without arguments. Other threads run while a kernel runs.

    Args:
        function: at the top of its module, which takes code from its own package and from `foreroute` alone.
        **options: of `numba.njit`.
    """
    if function is None:
        return lambda function: kernel(function, **options)
    # Nothing calls kernels as C functions.
    compiled = numba.njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
    if not numba.config.DISABLE_JIT:  # numba's switch for debuggers: then it hands back the function
        # Should another numba keep its cache elsewhere, then nothing is kept, and nothing stale is run.
        compiled._cache = _KernelCache(function)
    return compiled


def routine(function: F) -> F:
    """Compile for kernels that call it rarely or in many places.

    It only uses arrays that are handed in, so it needs no reference counts, whose atomic instructions take long.
    """
    compiled: F = numba.njit(**_PART)(function)
    return compiled


def inlined(function: F) -> F:
    """As `routine`, but within the code of each caller: a state of many arrays is slow to hand over."""
    compiled: F = numba.njit(forceinline=True, **_PART)(function)
    return compiled


def is_compiling() -> bool:
    """Whether a kernel is being compiled now, in any thread."""
    return _COMPILING.depth > 0


class _Compiling(event.Listener):
    """Functions that numba compiles now, one for the sake of another. It compiles in one thread at a time."""

    depth = 0

    def on_start(self, event: Any) -> None:
        self.depth += 1

    def on_end(self, event: Any) -> None:
        self.depth -= 1


_COMPILING = _Compiling()
event.register("numba:compile", _COMPILING)


class _KernelCache(NullCache):
    """The compiled forms of one function, each in a file of its own, where numba would have put it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        path = Path(function.__code__.co_filename)
        self._name = f"{path.stem}.{function.__qualname__}"
        self._folder: Path | None = None
        with suppress(OSError, RuntimeError):  # no source, or no folder can be written: compiled in each process
            self._sources = sources_digest(path)
            self._numbas = CompileResultCacheImpl(function)
            self._folder = Path(self._numbas.locator.get_cache_path())

    @property
    def cache_path(self) -> str | None:
        """Where the files are, for numba's statistics."""
        return None if self._folder is None else str(self._folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled form for these types, or None when it must be compiled."""
        target_context.refresh()
        codegen = target_context.codegen()
        path = self._path(sig, codegen)
        if path is None:
            return None
        try:
            reduced = pickle.loads(_opened(path, self._made_from()))
            return self._numbas.rebuild(target_context, reduced)
        except Exception:  # missing, stale, damaged, or of another version: whatever it is, compiling is the remedy
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled form, if it can be kept."""
        path = self._path(sig, data.codegen)
        if path is None or not self._numbas.check_cachable(data):
            return
        content = dumps(self._numbas.reduce(data))

        def write(file: IO[bytes]) -> None:
            os.fchmod(file.fileno(), 0o644)
            file.write(sha256(self._made_from() + content).digest() + content)

        with suppress(OSError):  # a full disk, a folder that is gone
            write_atomically(path, write)

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        """One file for each signature, processor, Python, and way to compile, so that they do not displace another."""
        if self._folder is None:
            return None
        config = numba.config
        made_for = [
            *map(_described, sig.args if hasattr(sig, "args") else sig),
            *map(str, codegen.magic_tuple()),
            sys.implementation.cache_tag,
            *(str(getattr(config, name)) for name in ("OPT", "BOUNDSCHECK", "LOOP_VECTORIZE", "SLP_VECTORIZE")),
        ]
        return self._folder / f"{self._name}-{sha256(repr(made_for).encode()).hexdigest()[:16]}.kernel"

    def _made_from(self) -> bytes:
        return repr((self._name, self._sources, numba.__version__)).encode()


def _opened(path: Path, made_from: bytes) -> bytes:
    """What stands behind the seal.

    Raises:
        InputError: when it is no file that only we can have written, is damaged, or was made from something else.
    """
    with RegularFile(path, InputError) as file:
        if file.status.st_uid not in (0, os.geteuid()) or file.status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InputError(f"{path} can be written by others")
        content = bytes(file.read(0, file.size))
    if sha256(made_from + content[_SEAL_BYTES:]).digest() != content[:_SEAL_BYTES]:
        raise InputError(f"{path} is damaged, or was made from something else")
    return content[_SEAL_BYTES:]


def _described(type_: Any) -> str:
    """A type of numba by name. numba's own names of named tuples lack their fields."""
    if isinstance(type_, types.BaseNamedTuple):
        of = type_.instance_class
        fields = (f"{field}: {_described(part)}" for field, part in zip(type_.fields, type_.types, strict=True))
        return f"{of.__module__}.{of.__qualname__}({', '.join(fields)})"
    if isinstance(type_, types.BaseTuple):
        return f"({', '.join(map(_described, type_.types))})"
    return str(type_)


@cache
def sources_digest(path: Path) -> str:
    """A digest of a source file and of all files of its package and of `foreroute` that it imports, and so on."""
    reached, waiting = {path}, [path]
    while waiting:
        new = set(_source(waiting.pop())[1]) - reached
        reached |= new
        waiting += new
    return sha256(b"".join(sorted(_source(source)[0] for source in reached))).hexdigest()


@cache
def _source(path: Path) -> tuple[bytes, tuple[Path, ...]]:
    """The digest of one file, and the files of its package and of `foreroute` that it imports."""
    content = path.read_bytes()
    own = path.parent
    while (own.parent / "__init__.py").exists():
        own = own.parent
    packages = {own.name: own, PACKAGE.name: PACKAGE}
    imported = []
    for module, names in _IMPORT.findall(content.decode()):
        package, *parts = module.split(".")
        if package not in packages:
            continue
        base = packages[package].joinpath(*parts)
        for place in (base, *(base / name for name in re.findall(r"\w+", names))):
            imported += [file for file in (place.with_name(f"{place.name}.py"), place / "__init__.py") if file.exists()]
    return sha256(content).digest(), tuple(imported)


NONE = cast(int, np.int64(-1))
"""No rank, no expert. A plain number would be a type of its own, and what it is handed to compiled once more."""

# Random words for compiled loops: a stream is one uint64, and the same on every machine.
SHIFT_32 = uint64(32)
LOW_32 = uint64(0xFFFFFFFF)
TO_UNIT = 1.0 / (1 << 32)


@kernel
def next_word(state: Any) -> Any:
    """Advance a splitmix64 stream (Steele, Lea and Flood, OOPSLA 2014). `state` is uint64 [1]."""
    state[0] += uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> uint64(27))) * uint64(0x94D049BB133111EB)
    return z ^ (z >> uint64(31))


@kernel
def next_unit(state: Any) -> float:
    """A float64 from 0 to below 1."""
    return float(next_word(state) >> SHIFT_32) * TO_UNIT


@kernel
def next_below(state: Any, limit: Any) -> Any:
    """An integer from 0 to below `limit`, itself below 2**32."""
    return np.int64(((next_word(state) >> SHIFT_32) * uint64(limit)) >> SHIFT_32)
