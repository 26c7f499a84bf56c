"""`foreroute convert`: engine output to a trace, and a trace to another encoding."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Literal

from foreroute.capture import Generation, decode, decode_generation, load_generation, save_generation
from foreroute.capture.arrays import parse_text
from foreroute.capture.generation import is_generation
from foreroute.cli.exit_codes import refuse_unused
from foreroute.cli.terminal import Console, working
from foreroute.errors import CaptureError, TraceError, TraceFileError, printable
from foreroute.files.regular import open_regular, read_file
from foreroute.files.writing import writing_named
from foreroute.trace import Encoding, load, save

OPTIONS = "Here token_ids is --tokens, start --start, weight_version --weight-version, and --model says the others"
"""The options that pass what `decode` advises to pass."""
HEADER = 9
"""Bytes that tell a trace file: a length, of which the upper half is zero as in no text, and an opening brace."""


def convert_file(
    source: Path,
    target: Path,
    to: Literal[Encoding, "generation"],
    *,
    model: Path | None = None,
    tokens: Path | None = None,
    start: int | None = None,
    weight_version: int | None = None,
) -> None:
    """Read `source`, whatever it is, and write `target`; say what both are. `foreroute.cli.main` has the options."""
    # before a large source is read
    with writing_named(target, TraceFileError):
        if target.exists():
            raise TraceFileError(f"{target} already exists; pass another path")
    console = Console(soft_wrap=True, highlight=False)
    generation: Generation | None = None  # read where log-probs are to be kept
    with working(f"reading {source}", console):
        if _is_trace(source):
            given = {"--model": model, "--tokens": tokens, "--start": start, "--weight-version": weight_version}
            # a version given by hand would silently contradict that of the trace
            refuse_unused(given, f"about {source}, a trace, which says it itself; leave it out")
            what = "the trace of a generation, without its log-probs" if is_generation(source) else "trace"
            if to == "generation":
                what, generation = "generation", load_generation(source)
            trace = load(source) if generation is None else generation.trace
        else:
            facts = _facts_of(model)
            data, ids = read_file(source, TraceFileError), None if tokens is None else _tokens(tokens)
            said = {"start": start, "weight_version": weight_version}
            facts |= {name: value for name, value in said.items() if value is not None}
            try:
                if to == "generation":
                    generation = decode_generation(data, token_ids=ids, **facts)
                trace = decode(data, token_ids=ids, **facts) if generation is None else generation.trace
            except TraceError as error:
                raise CaptureError(f"{source}: {error}. {OPTIONS}") from error
            what = f"output of the form {trace.provenance['wire']}"
            if weight_version is None:
                warnings.warn(
                    f"{source} was read without --weight-version, so {target} does not say which weights made its "
                    "routes: a replay that names a version refuses it, and foreroute doctor --weight-version calls it "
                    "a problem (-1 says that no version is known)",
                    stacklevel=1,
                )
    console.print(printable(f"read   {source}: {what}, {trace!r}"), markup=False)
    with working(f"writing {target}", console):
        if generation is None:
            save(trace, target, encoding="sets" if to == "sets" else "ordered")
        else:
            save_generation(generation, target)
    console.print(printable(f"wrote  {target}: {to}, {target.stat().st_size:,} bytes"), markup=False)


def _is_trace(path: Path) -> bool:
    """Say whether a file begins as a trace does; text of engines may hold any words of ours."""
    with open_regular(path, TraceFileError) as file:
        return file.read(HEADER)[4:] == b"\0\0\0\0{"


def _tokens(path: Path) -> list[Any]:
    """Read token lists as they stand in the file; `decode` checks them."""
    tokens = parse_text(read_file(path, CaptureError), name=str(path))
    if not isinstance(tokens, list):
        raise CaptureError(f"{path} holds a {type(tokens).__name__}; expected a list of token lists")
    return tokens


def _facts_of(model: Path | None) -> dict[str, Any]:
    """Read which layers route, the size of the vocabulary, and the indexers, from a trace or a model's folder."""
    if model is None:
        raise CaptureError(
            "engine output does not say which model it is from; pass --model, a trace or the folder of the model"
        )
    is_folder = os.path.isdir(model)  # unlike Path.is_dir, false for a name that is too long
    if is_folder or model.name == "config.json":
        from foreroute.adapters.checkpoint import ServedModel  # needs the extra hf

        served = ServedModel.at(model if is_folder else model.parent)
        return {"model": served.spec, "vocabulary_size": served.vocabulary_size, "indexers": served.indexers}
    return {"model": load(model).spec}
