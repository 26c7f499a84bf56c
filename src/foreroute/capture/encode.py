"""The way out: routes in the form that another framework reads."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.model_facts import ModelFacts
from foreroute.capture.recognition import shown
from foreroute.capture.wires import RULES, Absent, WireKind
from foreroute.errors import CaptureError
from foreroute.trace import RoutingTrace

WRITABLE = (WireKind.NPY, WireKind.RAW_INT32, WireKind.NEMO_RL, WireKind.PRIME_RL, WireKind.SKYRL)
"""The forms that `encode` writes: vLLM's base64 .npy, SGLang's raw int32, and three frameworks' own."""


def encode(trace: RoutingTrace, kind: WireKind, *, num_hidden_layers: int | None = None) -> list[Any]:
    """Make one payload per sequence, without the last token's row: what `decode` reads back with the same facts.

    These forms hold routes alone: gate weights and other decisions of the trace stay behind.

    Args:
        trace: the routes.
        kind: one of `WRITABLE`.
        num_hidden_layers: decoder layers in all; when given, dense layers get constant columns as engines emit them.

    Returns:
        Text, or for tables a mapping, per sequence; all of it fits into JSON.

    Raises:
        CaptureError: for a form that is not written, or a sequence with missing rows in a form that cannot say so.
    """
    if not isinstance(trace, RoutingTrace):
        raise CaptureError(f"the trace is {shown(trace)}; expected a RoutingTrace")
    if not isinstance(kind, str) or kind not in WRITABLE:
        name = kind if isinstance(kind, str) else shown(kind)
        raise CaptureError(f"routes cannot be written as {name:.60}; choose one of {', '.join(WRITABLE)}")
    facts = ModelFacts(trace.spec, num_hidden_layers)
    return [_payload(trace.select([s]), kind, facts, s) for s in range(len(trace))]


def _payload(sequence: RoutingTrace, kind: WireKind, facts: ModelFacts, number: int) -> Any:
    valid = sequence.valid_N[:-1]
    absent = RULES[kind].absent
    gaps = np.flatnonzero(~valid)
    # zeros mean "never routed" at the end alone, and with one pick they are a route to expert 0
    at_the_end = len(gaps) < len(valid) and (np.diff(gaps, append=len(valid)) == 1).all() and sequence.spec.top_k > 1
    if len(gaps) and (absent is Absent.NEVER or (absent is Absent.ZERO and not at_the_end)):
        raise CaptureError(
            f"sequence {number} has no route at position {int(gaps[0])}, which {kind} cannot say"
            f"{'' if absent is Absent.NEVER else ' there'}; choose {WireKind.NEMO_RL} or {WireKind.SKYRL}, or leave "
            "the sequence out"
        )
    marker = -1 if absent is Absent.MINUS_ONE else 0
    rows = np.where(valid[:, None, None], sequence.expert_ids_NLK[:-1].astype(np.int64), marker)
    if facts.num_hidden_layers is not None:
        wide = np.zeros((len(rows), facts.num_hidden_layers, sequence.spec.top_k), np.int64)
        wide[~valid] = marker
        wide[:, [layer.index for layer in sequence.spec.layers]] = rows
        rows = wide
    return _write(rows, kind, sequence)


def _write(rows: NDArray[np.int64], kind: WireKind, sequence: RoutingTrace) -> Any:
    unsigned = sequence.spec.id_dtype
    signed = np.min_scalar_type(-sequence.spec.num_experts)  # holds -1 and the highest id
    if kind is WireKind.NPY:
        buffer = io.BytesIO()
        np.save(buffer, rows.astype(unsigned), allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()
    if kind is WireKind.RAW_INT32:
        return _text(rows.astype("<i4"))
    if kind is WireKind.NEMO_RL:
        shape = "x".join(map(str, rows.shape))
        return f"nrlre1:{signed}:{shape}:{_text(rows.astype(signed))}"
    dtype = unsigned if kind is WireKind.PRIME_RL else signed
    table = {"data": _text(rows.astype(dtype)), "shape": list(rows.shape), "dtype": str(dtype)}
    return {**table, "start": 0} if kind is WireKind.PRIME_RL else table


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).decode()
