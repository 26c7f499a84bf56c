"""`foreroute convert`: engine output to a trace, and a trace to another encoding or another framework's form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreroute.capture import WRITABLE, ModelFacts, WireKind, decode, encode, facts_of_config
from foreroute.capture.recognition import parse_text
from foreroute.cli.terminal import Console, working
from foreroute.errors import CaptureError, TraceFileError, printable
from foreroute.files import RegularFile, read_file, write_atomically, writing_named
from foreroute.trace import ENCODINGS, RoutingSpec, RoutingTrace, load, save

HEADER = 9
"""Bytes that tell a trace file: a length, of which the upper half is zero as in no text, and an opening brace."""
LINE = {"token_ids", "routed_experts"}
"""What a line holds that `convert` writes."""


@dataclass(frozen=True)
class Origin:
    """What is known of engine output beyond its bytes; see `foreroute.capture.decode`."""

    model: Path | None
    tokens: Path | None
    start: int | None
    weight_version: int
    engine: str
    engine_version: str


def convert_file(source: Path, target: Path, to: str, origin: Origin) -> None:
    """Read `source`, whatever it is, and write `target`; say what both are."""
    with writing_named(target, TraceFileError):
        if target.exists():
            raise TraceFileError(f"{target} already exists; pass another path")
    if to not in ENCODINGS and to not in WRITABLE:
        raise CaptureError(f"--to is {to!r}; expected one of {', '.join([*ENCODINGS, *WRITABLE])}")
    console = Console(soft_wrap=True, highlight=False)
    with working(f"reading {source}", console):
        trace, what = _read(source, origin)
    console.print(printable(f"read   {source}: {what}, {trace!r}"), markup=False)
    with working(f"writing {target}", console):
        _write(trace, target, to, origin)
    console.print(printable(f"wrote  {target}: {to}, {target.stat().st_size:,} bytes"), markup=False)


def _write(trace: RoutingTrace, target: Path, to: str, origin: Origin) -> None:
    if to in ENCODINGS:
        save(trace, target, encoding=to)
        return
    payloads = encode(trace, WireKind(to), num_hidden_layers=_facts(origin, trace.spec).num_hidden_layers)
    lines = [
        json.dumps({"token_ids": trace.tokens(s).tolist(), "routed_experts": payload})
        for s, payload in enumerate(payloads)
    ]
    with writing_named(target, TraceFileError):
        write_atomically(target, "".join(line + "\n" for line in lines), overwrite=False)


def _read(source: Path, origin: Origin) -> tuple[RoutingTrace, str]:
    with RegularFile(source, TraceFileError) as file:
        head = file.read(0, min(HEADER, file.size))
    if head[4:] == b"\0\0\0\0{":
        return load(source), "trace"
    facts = _facts(origin, None)
    data = read_file(source, TraceFileError)
    first, rest = _first_line(data, source)
    if isinstance(first, dict) and first.keys() == LINE:
        rows = [first, *(_line(line, number, source) for number, line in rest)]
        trace = _decoded([row["routed_experts"] for row in rows], [row["token_ids"] for row in rows], facts, origin)
        return trace, f"{len(rows)} lines of {_form(trace)}"
    whole = data if first is None or rest else first
    trace = _decoded(whole, _tokens(origin), facts, origin)
    return trace, _form(trace)


def _first_line(data: bytes, source: Path) -> tuple[Any, list[tuple[int, bytes]]]:
    """Read the first line, if it is a JSON object on its own, and give the other lines with their numbers."""
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not lines or not lines[0][1].lstrip().startswith(b"{"):
        return None, []
    try:
        return parse_text(lines[0][1], name=str(source)), lines[1:]
    except CaptureError:
        if len(lines) == 1:
            raise
        return None, []  # an object over several lines


def _line(line: bytes, number: int, source: Path) -> dict[str, Any]:
    row = parse_text(line, name=f"line {number} of {source}")
    if not isinstance(row, dict) or row.keys() != LINE:
        raise CaptureError(f"line {number} of {source} is not an object of {' and '.join(sorted(LINE))}")
    return row


def _decoded(output: object, tokens: Any, facts: ModelFacts, origin: Origin) -> RoutingTrace:
    return decode(
        output,
        model=facts,
        token_ids=tokens,
        start=origin.start,
        weight_version=origin.weight_version,
        engine=origin.engine,
        engine_version=origin.engine_version,
    )


def _form(trace: RoutingTrace) -> str:
    return WireKind(trace.provenance["wire"]).description


def _tokens(origin: Origin) -> Any:
    """Read token lists as they stand in the file; `decode` checks them."""
    if origin.tokens is None:
        return None
    tokens = parse_text(read_file(origin.tokens, CaptureError), name=str(origin.tokens))
    if not isinstance(tokens, list):
        raise CaptureError(f"{origin.tokens} holds a {type(tokens).__name__}; expected a list of token lists")
    return tokens


def _facts(origin: Origin, known: RoutingSpec | None) -> ModelFacts:
    if origin.model is None:
        if known is not None:
            return ModelFacts(known)
        raise CaptureError("engine output does not say which model it is from; pass --model, a trace or a config.json")
    if origin.model.suffix != ".json":
        return ModelFacts(load(origin.model).spec)
    config = parse_text(read_file(origin.model, CaptureError), name=str(origin.model))
    try:
        return facts_of_config(config)
    except CaptureError as error:
        raise CaptureError(f"{origin.model}: {error}") from error
