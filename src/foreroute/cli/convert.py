"""`foreroute convert`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreroute.capture import WRITABLE, ModelFacts, WireKind, decode, encode, recognise
from foreroute.cli.terminal import Console
from foreroute.errors import CaptureError, InputError, TraceFileError
from foreroute.files import write_atomically
from foreroute.trace import CODECS, RoutedLayer, RoutingSpec, RoutingTrace, concatenate, load, save

SAFETENSORS_HEADER = 9
"""A trace file begins with eight bytes of length and an opening brace."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
PICKS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")


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
    if target.exists():
        raise TraceFileError(f"{target} already exists; pass another path")
    if to not in CODECS and to not in WRITABLE:
        raise CaptureError(f"--to is {to!r}; expected one of {', '.join([*CODECS, *WRITABLE])}")
    console = Console(soft_wrap=True, highlight=False)
    trace, what = _read(source, origin)
    console.print(f"read   {source}: {what}, {trace!r}", markup=False)
    if to in CODECS:
        save(trace, target, codec=to)
    else:
        payloads = encode(trace, WireKind(to), num_hidden_layers=_facts(origin, trace.spec).num_hidden_layers)
        lines = [
            json.dumps({"token_ids": trace.tokens(s).tolist(), "routed_experts": payload})
            for s, payload in enumerate(payloads)
        ]
        write_atomically(target, "".join(line + "\n" for line in lines))
    console.print(f"wrote  {target}: {to}, {target.stat().st_size:,} bytes", markup=False)


def _read(source: Path, origin: Origin) -> tuple[RoutingTrace, str]:
    if not source.is_file():
        raise TraceFileError(f"{source} does not exist or is not a file")
    data = source.read_bytes()
    if data[:SAFETENSORS_HEADER][-1:] == b"{":
        return load(source), "trace"
    facts = _facts(origin, None)
    rows = _lines(data)
    if rows is None:
        return _decoded(data, _tokens(origin), facts, origin), recognise(data).description
    parts = [_decoded(row["routed_experts"], [row["token_ids"]], facts, origin) for row in rows]
    return concatenate(parts), f"{len(rows)} lines of {recognise(rows[0]['routed_experts']).description}"


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


def _lines(data: bytes) -> list[dict[str, Any]] | None:
    """The lines that `convert` writes: token_ids and routed_experts; None when it is something else."""
    try:
        rows = [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None
    ours = all(isinstance(row, dict) and row.keys() == {"token_ids", "routed_experts"} for row in rows)
    return rows if rows and ours else None


def _tokens(origin: Origin) -> Any:
    if origin.tokens is None:
        return None
    try:
        return [np.asarray(sequence, np.int64) for sequence in json.loads(origin.tokens.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise CaptureError(f"{origin.tokens} is not a JSON list of token lists ({error})") from error


def _facts(origin: Origin, known: RoutingSpec | None) -> ModelFacts:
    if origin.model is None:
        if known is not None:
            return ModelFacts(known)
        raise CaptureError("engine output does not say which model it is from; pass --model, a trace or a config.json")
    if origin.model.suffix != ".json":
        return ModelFacts(load(origin.model).spec)
    try:
        config = json.loads(origin.model.read_text(encoding="utf-8"))
        facts = _facts_of_config(config.get("text_config") or config)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, StopIteration) as error:
        if isinstance(error, InputError):
            raise
        raise CaptureError(
            f"{origin.model} does not tell experts, picks and layers ({error!r}); pass a trace of the model instead"
        ) from error
    return facts


def _facts_of_config(config: dict[str, Any]) -> ModelFacts:
    layers = int(config["num_hidden_layers"])
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        dense = set(config.get("mlp_only_layers") or []) | set(range(int(config.get("first_k_dense_replace") or 0)))
    else:
        dense = {i for i, kind in enumerate(kinds) if kind == "dense"}
    spec = RoutingSpec(
        int(next(config[name] for name in EXPERTS if name in config)),
        int(next(config[name] for name in PICKS if name in config)),
        tuple(RoutedLayer(i) for i in range(layers) if i not in dense),
        model=str(config.get("model_type", "")),
    )
    return ModelFacts(spec, layers)
