"""The door: whatever an engine or framework handed out, as a routing trace, or an error that says why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arguments import shown, whole_number
from foreroute.capture.containers import Payload, read_container
from foreroute.capture.engines import known_engine, named_kind, require_logical_ids
from foreroute.capture.facts import ModelFacts
from foreroute.capture.kinds import RULES, Absent, LastRow, WireKind, WireRules
from foreroute.capture.suspect import (
    refuse_constant_layers,
    refuse_false_rows,
    refuse_routed_dense,
    routed_before_zeros,
)
from foreroute.capture.tokens import MAX_INT32, tokens_of
from foreroute.capture.wire import read_array, read_base64, read_envelope, read_lists, read_npy, read_raw, read_table
from foreroute.errors import CaptureError
from foreroute.trace import NO_VERSION, RoutingSpec, RoutingTrace


def decode(
    output: object,
    *,
    model: RoutingSpec | ModelFacts,
    token_ids: Any = None,
    start: int | None = None,
    weight_version: int = NO_VERSION,
    engine: str = "",
    engine_version: str = "",
) -> RoutingTrace:
    """Read the routes of every sequence in `output`.

    Args:
        output: a response (parsed, or JSON text or bytes), an in-process output, a list of them, or bare routes.
        model: the routing spec, or `ModelFacts` where the engine's layer axis counts dense layers too.
        token_ids: prompt and response tokens, [T] for one sequence or S of them. Needed where the output does not carry
            them; compared with those that it carries.
        start: the position of the first row, where the request skipped a known prefix (`routed_experts_prompt_start`,
            `routed_experts_start_len`). Earlier rows are marked absent.
        weight_version: the weights that computed the routes.
        engine: "vllm", "sglang", "sglang-jax", "tensorrt-llm" or "lmdeploy", where the output does not tell.
        engine_version: such as "0.5.12"; decides whether the ids are logical.

    Returns:
        One sequence for each choice. Row p is the routing of input position p; the last token's row is absent.

    Raises:
        CaptureError: when the form is unknown or damaged, rows or layers do not fit, or the routes cannot be trusted.
    """
    facts = model if isinstance(model, ModelFacts) else ModelFacts(model)
    engine = known_engine(engine)
    version = whole_number(weight_version, "weight_version", NO_VERSION, MAX_INT32)
    if start is not None:
        start = whole_number(start, "start", 0, MAX_INT32)
    container, payloads = read_container(output)
    kind = named_kind(container, engine)
    require_logical_ids(kind, engine, engine_version)
    tokens = tokens_of(payloads, token_ids)
    placed = [
        _place(payload, _Place(kind, len(t), facts, f"sequence {s}"), start)
        for s, (payload, t) in enumerate(zip(payloads, tokens, strict=True))
    ]
    _require_a_route(placed)
    facts_known = {"wire": kind.value, "engine": engine, "engine_version": engine_version}
    trace = RoutingTrace.from_rows(
        facts.spec,
        tokens,
        [one.ids for one in placed],
        valid=[one.valid for one in placed],
        weight_versions=[np.full(len(t), version) for t in tokens],
        provenance={name: value for name, value in facts_known.items() if value},
    )
    refuse_constant_layers(trace)
    return trace


@dataclass(frozen=True)
class _Place:
    """Where the rows of one sequence go: T tokens of a model, read from a form."""

    kind: WireKind
    num_tokens: int
    facts: ModelFacts
    what: str

    @property
    def rules(self) -> WireRules:
        return RULES[self.kind]


@dataclass(frozen=True)
class _Placed:
    """One sequence: rows [T, L, K] at their positions, bool [T] of which were routed, and how many rows there were."""

    ids: NDArray[Any]
    valid: NDArray[np.bool_]
    num_rows: int


def _place(payload: Payload, place: _Place, start: int | None) -> _Placed:
    first = _first_position(payload.start, start, place)
    rows_RAK = _rows(payload, place, first)
    spec, routed = place.facts.spec, place.num_tokens - 1 - first
    if rows_RAK.ndim != 3:
        raise CaptureError(f"{place.what} has routes of shape {rows_RAK.shape}; expected [rows, layers, picks]")
    _refuse_row_count(len(rows_RAK), routed, place, first)
    ids = np.zeros((place.num_tokens, spec.num_layers, spec.top_k), rows_RAK.dtype)
    valid = np.zeros(place.num_tokens, np.bool_)
    if not len(rows_RAK):
        return _Placed(ids, valid, 0)
    if rows_RAK.shape[2] != spec.top_k:
        raise CaptureError(f"{place.what} has {rows_RAK.shape[2]} picks in a row; expected top_k = {spec.top_k}")
    columns = place.facts.routed_columns(rows_RAK.shape[1], what=place.what)
    dense = np.setdiff1d(np.arange(rows_RAK.shape[1]), columns)
    rows_RAK = _without_last(rows_RAK, columns, routed, place)
    rows_RLK = rows_RAK[:, columns]
    present = _present(rows_RLK, place, first)
    stop = first + len(rows_RLK)
    ids[first:stop], valid[first:stop] = rows_RLK, present
    refuse_false_rows(rows_RLK, present, spec, what=place.what, first_position=first)
    if place.rules.dense_is_constant:
        refuse_routed_dense(rows_RAK[present][:, dense], dense.tolist(), what=place.what)
    return _Placed(ids, valid, len(rows_RLK))


def _rows(payload: Payload, place: _Place, first: int) -> NDArray[Any]:
    """The payload as an array, the prompt's rows joined where the form keeps them apart."""
    rows = _array(payload.routes, payload, place, first)
    if payload.prompt_routes is None:
        return rows
    prompt = _array(payload.prompt_routes, payload, place, first)
    if prompt.ndim != 3 or rows.ndim != 3 or (len(rows) and len(prompt) and prompt.shape[1:] != rows.shape[1:]):
        raise CaptureError(
            f"{place.what} has prompt routes of shape {prompt.shape} and generated routes of shape {rows.shape}; "
            "expected the same layers and picks"
        )
    return np.concatenate([part for part in (prompt, rows) if len(part)] or [rows])


def _array(routes: Any, payload: Payload, place: _Place, first: int) -> NDArray[Any]:
    if isinstance(routes, bytes):
        return read_npy(routes)
    if isinstance(routes, str):
        return _from_text(routes, payload, place, first)
    if isinstance(routes, Mapping):
        return read_table(routes)
    return read_lists(routes) if isinstance(routes, list | tuple) else read_array(routes)


def _from_text(text: str, payload: Payload, place: _Place, first: int) -> NDArray[Any]:
    if place.kind is WireKind.LMDEPLOY:
        raise CaptureError(
            f"{place.what} has the text {text[:40]!r}: a key of a Ray shared store, not routes. Fetch the object by "
            "it, or start LMDeploy without enable_transfer_obj_ref"
        )
    if place.kind is WireKind.NEMO_RL:
        return read_envelope(text)
    if place.kind in (WireKind.NPY, WireKind.VLLM_NPY):
        return read_npy(read_base64(text))
    flat = read_raw(text, payload.dtype)
    rows, picks = place.num_tokens - 1 - first, place.facts.spec.top_k
    if rows < 1 and not flat.size:
        return np.zeros((0, 0, 0), flat.dtype)
    fits = [layers for layers in place.facts.axis_lengths if layers * rows * picks == flat.size]
    if not fits:
        raise CaptureError(
            f"{place.what} has {flat.size} ids without a shape; expected {rows} rows of top-{picks} over "
            f"{' or '.join(map(str, place.facts.axis_lengths))} layers. "
            "Check the tokens, start, num_hidden_layers and top_k"
        )
    return flat.reshape(rows, fits[0], picks)


def _present(rows_RLK: NDArray[Any], place: _Place, first: int) -> NDArray[np.bool_]:
    """A bool [R], False where the form says that a row was never routed."""
    absent = place.rules.absent
    if absent is Absent.NEVER:
        return np.ones(len(rows_RLK), np.bool_)
    if absent is Absent.MINUS_ONE:
        present: NDArray[np.bool_] = (rows_RLK != -1).any(axis=(1, 2))
        return present
    present = routed_before_zeros(rows_RLK, what=place.what, first_position=first)
    if place.kind is WireKind.PRIME_RL and len(present) and not present.any():
        raise CaptureError(
            f"{place.what} has nothing but zeros in its {len(present)} rows; the engine never filled them. Ask it for "
            "routes, and leave out sequences that have none"
        )
    return present


def _without_last(rows_RAK: NDArray[Any], columns: NDArray[np.int64], routed: int, place: _Place) -> NDArray[Any]:
    """The rows, less the one of the last token where the form lets it be dropped."""
    if len(rows_RAK) == routed or place.rules.last_row is LastRow.KEEP:
        return rows_RAK
    last = rows_RAK[routed, columns]
    if place.rules.last_row is LastRow.FILLER and (last != last[0]).any():
        raise CaptureError(
            f"{place.what} has routes for its last token, {last[0].tolist()} in the first layer, which no sampling "
            "engine computes; expected padding there. The rows are shifted: check the start and the tokens"
        )
    return rows_RAK[:routed]


def _refuse_row_count(rows: int, routed: int, place: _Place, first: int) -> None:
    surplus_allowed = place.rules.last_row is not LastRow.REFUSE
    if rows == routed or (rows == routed + 1 and surplus_allowed) or (not rows and place.num_tokens == 0):
        return
    raise CaptureError(
        f"{place.what} has {rows} rows for {place.num_tokens} tokens from position {first}; expected {routed}"
        f"{f' or {routed + 1}' if surplus_allowed else ''}, one for each token but the last. "
        + (
            "Rows are missing: pass start= if the request skipped a known prefix"
            if rows < routed
            else "Rows are too many: pass the tokens of prompt and response, or the start of the request"
        )
    )


def _first_position(stated: Any, start: int | None, place: _Place) -> int:
    if stated is not None and (type(stated) is not int or (start is not None and stated != start)):
        raise CaptureError(
            f"{place.what} states start {shown(stated)}; expected {'a position' if start is None else start}"
        )
    first = stated if stated is not None else (start or 0)
    if not 0 <= first <= max(place.num_tokens - 1, 0):
        raise CaptureError(
            f"{place.what} starts at {shown(first)}; expected a position of its {place.num_tokens} tokens"
        )
    return int(first)


def _require_a_route(placed: list[_Placed]) -> None:
    if not any(one.valid.any() for one in placed) and (rows := sum(one.num_rows for one in placed)):
        raise CaptureError(
            f"none of its {rows} rows has a route: all are marked as never routed. The capture failed, or was not "
            "asked for; a sequence that was never routed is RoutingTrace.unrouted"
        )
