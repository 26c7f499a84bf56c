"""`foreroute convert`: engine output to a trace, and a trace to another encoding."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreroute.capture import decode
from foreroute.capture.arrays import parse_text
from foreroute.cli.terminal import Console, working
from foreroute.errors import CaptureError, TraceFileError, printable
from foreroute.files import open_regular, read_file, writing_named
from foreroute.trace import ENCODINGS, IndexerSpec, RoutingSpec, RoutingTrace, load, save

HEADER = 9
"""Bytes that tell a trace file: a length, of which the upper half is zero as in no text, and an opening brace."""


@dataclass(frozen=True)
class Origin:
    """What is known of engine output beyond its bytes; see `foreroute.capture.decode`."""

    model: Path | None
    tokens: Path | None
    start: int
    weight_version: int


def convert_file(source: Path, target: Path, to: str, origin: Origin) -> None:
    """Read `source`, whatever it is, and write `target`; say what both are."""
    with writing_named(target, TraceFileError):
        if target.exists():
            raise TraceFileError(f"{target} already exists; pass another path")
    if to not in ENCODINGS:
        raise CaptureError(f"--to is {to!r}; expected one of {', '.join(ENCODINGS)}")
    console = Console(soft_wrap=True, highlight=False)
    with working(f"reading {source}", console):
        trace, what = _read(source, origin)
    console.print(printable(f"read   {source}: {what}, {trace!r}"), markup=False)
    with working(f"writing {target}", console):
        save(trace, target, encoding=to)
    console.print(printable(f"wrote  {target}: {to}, {target.stat().st_size:,} bytes"), markup=False)


def _read(source: Path, origin: Origin) -> tuple[RoutingTrace, str]:
    if _is_trace(source):
        return load(source), "trace"
    spec, vocabulary_size, indexers = _model(origin)
    trace = decode(
        read_file(source, TraceFileError),
        model=spec,
        token_ids=_tokens(origin),
        start=origin.start,
        weight_version=origin.weight_version,
        vocabulary_size=vocabulary_size,
        indexers=indexers,
    )
    return trace, f"output of the form {trace.provenance['wire']}"


def _is_trace(path: Path) -> bool:
    with open_regular(path, TraceFileError) as file:
        return file.read(HEADER)[4:] == b"\0\0\0\0{"


def _tokens(origin: Origin) -> Any:
    """Read token lists as they stand in the file; `decode` checks them."""
    if origin.tokens is None:
        return None
    tokens = parse_text(read_file(origin.tokens, CaptureError), name=str(origin.tokens))
    if not isinstance(tokens, list):
        raise CaptureError(f"{origin.tokens} holds a {type(tokens).__name__}; expected a list of token lists")
    return tokens


def _model(origin: Origin) -> tuple[RoutingSpec, int | None, IndexerSpec | None]:
    """Which layers route, the size of the vocabulary, and the indexers: of a trace, or of a model's folder."""
    if origin.model is None:
        raise CaptureError(
            "engine output does not say which model it is from; pass --model, a trace or the folder of the model"
        )
    is_folder = os.path.isdir(origin.model)  # unlike Path.is_dir, false for a name that is too long
    if is_folder or origin.model.name == "config.json":
        from foreroute.adapters.checkpoint import ServedModel  # needs the extra hf

        served = ServedModel.at(origin.model if is_folder else origin.model.parent)
        return served.spec, served.vocabulary_size, served.indexers
    return load(origin.model).spec, None, None
