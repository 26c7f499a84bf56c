"""The door: whatever an engine or framework handed out, as a routing trace, or an error that says why not.

One sequence at a time: its payload becomes an array, its rows are put at their positions and its layers on the axis of
the model, and what cannot be true is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arrays import read_base64, read_envelope, read_lists, read_npy, read_raw, read_table
from foreroute.capture.checks import (
    refuse_constant_layers,
    refuse_false_rows,
    refuse_routed_dense,
    routed_before_zeros,
)
from foreroute.capture.indexers import decode_choices
from foreroute.capture.model_facts import ModelFacts
from foreroute.capture.recognition import (
    MAX_INT32,
    RawSequence,
    as_array,
    is_array,
    items_of,
    read_array,
    read_container,
    shown,
    whole_number,
)
from foreroute.capture.sampling_masks import decode_masks
from foreroute.capture.wires import (
    ENGINES,
    FIRST_LOGICAL_SGLANG,
    REFINED,
    RULES,
    WRITERS,
    Absent,
    LastRow,
    WireKind,
    WireRules,
)
from foreroute.errors import CaptureError
from foreroute.trace import NO_VERSION, SAMPLING, RoutingSpec, RoutingTrace


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
    """Read the routes of every sequence in `output`, and where it has them its sampling masks and indexer choices.

    Args:
        output: a response (parsed, or JSON text or bytes), an in-process output, a list of them, or bare routes.
        model: the routing spec, or `ModelFacts` where the engine's layer axis counts dense layers too, or the output
            has sampling masks or choices of indexers.
        token_ids: prompt and response tokens, [T] for one sequence or S of them. Needed where the output does not carry
            them; compared with those that it carries.
        start: the position of the first row, where the request skipped a known prefix (`routed_experts_prompt_start`,
            `routed_experts_start_len`). Earlier rows are marked absent.
        weight_version: the weights that computed the routes.
        engine: "vllm", "sglang", "sglang-jax", "tensorrt-llm" or "lmdeploy", where the output does not tell.
        engine_version: such as "0.5.12"; decides whether the ids are logical.

    Returns:
        One sequence for each choice. Row p is the routing of input position p; the last token's row is absent. The
        masks are `trace.streams["sampling"]`, the choices `trace.streams["indexer"]`.

    Raises:
        CaptureError: when the form is unknown or damaged, rows or layers do not fit, or routes, masks or choices cannot
            be trusted.
    """
    engine = known_engine(engine)
    facts = model if isinstance(model, ModelFacts) else ModelFacts(model)
    version = whole_number(weight_version, "weight_version", NO_VERSION, MAX_INT32)
    if start is not None:
        start = whole_number(start, "start", 0, MAX_INT32)
    container, sequences = read_container(output)
    kind = named_kind(container, engine)
    require_logical_ids(kind, engine, engine_version)
    tokens = tokens_of(sequences, token_ids)
    spec = facts.spec
    offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    ids_NLK = np.zeros((int(offsets[-1]), spec.num_layers, spec.top_k), spec.id_dtype)
    valid_N, rows_seen = np.zeros(len(ids_NLK), np.bool_), 0
    for s, raw in enumerate(sequences):
        here = slice(int(offsets[s]), int(offsets[s + 1]))
        wanted = _Wanted(kind, len(tokens[s]), facts, f"sequence {s}")
        rows_seen += _decode_sequence(raw, wanted, start, ids_NLK[here], valid_N[here])
    if rows_seen and not valid_N.any():
        raise CaptureError(
            f"none of its {rows_seen} rows has a route: all are marked as never routed. The capture failed, or was not "
            "asked for; a sequence that was never routed is RoutingTrace.unrouted"
        )
    stated = {"wire": kind.value, "engine": engine, "engine_version": engine_version}
    # The constructor trusts its arrays: all that `from_rows` would check was checked above, with better words.
    trace = RoutingTrace(
        spec=spec,
        expert_ids_NLK=ids_NLK,
        valid_N=valid_N,
        token_ids_N=np.concatenate([*tokens, np.zeros(0, np.int32)]),
        weight_versions_N=np.where(valid_N, np.int32(version), np.int32(NO_VERSION)),
        offsets=offsets,
        provenance={name: value for name, value in stated.items() if value},
    )
    refuse_constant_layers(trace)
    masks = decode_masks(sequences, tokens, facts.vocabulary_size)
    return decode_choices(trace if masks is None else trace.with_stream(SAMPLING, masks), sequences, facts)


@dataclass(frozen=True)
class _Wanted:
    """What the rows of one sequence must fit: its T tokens, the model, and the promises of the form."""

    kind: WireKind
    num_tokens: int
    facts: ModelFacts
    what: str

    @property
    def rules(self) -> WireRules:
        return RULES[self.kind]


def _decode_sequence(
    raw: RawSequence, wanted: _Wanted, start: int | None, ids_TLK: NDArray[Any], valid_T: NDArray[np.bool_]
) -> int:
    """Write the routes of one sequence to their positions; returns how many rows there were.

    An engine's rows are [R, A, K], with A the layers on its axis, dense ones maybe among them.
    """
    first = _first_position(raw.start, start, wanted)
    rows_RAK = _rows(raw, wanted, first)
    spec, routed = wanted.facts.spec, wanted.num_tokens - 1 - first
    if rows_RAK.ndim != 3:
        raise CaptureError(f"{wanted.what} has routes of shape {rows_RAK.shape}; expected [rows, layers, picks]")
    _refuse_row_count(len(rows_RAK), routed, wanted, first)
    if not len(rows_RAK):
        return 0
    if rows_RAK.shape[2] != spec.top_k:
        raise CaptureError(f"{wanted.what} has {rows_RAK.shape[2]} picks in a row; expected top_k = {spec.top_k}")
    columns = wanted.facts.routed_columns(rows_RAK.shape[1], what=wanted.what)
    dense = np.setdiff1d(np.arange(rows_RAK.shape[1]), columns)
    rows_RAK = _without_last(rows_RAK, columns, routed, wanted)
    rows_RLK = rows_RAK[:, columns]
    present_R = _present(rows_RLK, wanted, first)
    refuse_false_rows(rows_RLK, present_R, spec, what=wanted.what, first_position=first)
    if wanted.rules.dense_is_constant:
        refuse_routed_dense(rows_RAK[present_R][:, dense], dense.tolist(), what=wanted.what)
    here = slice(first, first + len(rows_RLK))
    ids_TLK[here][present_R] = rows_RLK[present_R]  # below E, so that they survive the cast
    valid_T[here] = present_R
    return len(rows_RLK)


def _rows(raw: RawSequence, wanted: _Wanted, first: int) -> NDArray[Any]:
    """Read the routes of one sequence, the prompt's rows joined where the form keeps them apart."""
    rows = _array(raw.routes, raw, wanted, first)
    if raw.prompt_routes is None:
        return rows
    prompt = _array(raw.prompt_routes, raw, wanted, first)
    if prompt.ndim != 3 or rows.ndim != 3 or (len(rows) and len(prompt) and prompt.shape[1:] != rows.shape[1:]):
        raise CaptureError(
            f"{wanted.what} has prompt routes of shape {prompt.shape} and generated routes of shape {rows.shape}; "
            "expected the same layers and picks"
        )
    return np.concatenate([part for part in (prompt, rows) if len(part)] or [rows])


def _array(routes: Any, raw: RawSequence, wanted: _Wanted, first: int) -> NDArray[Any]:
    if isinstance(routes, bytes):
        return read_npy(routes)
    if isinstance(routes, str):
        return _from_text(routes, raw, wanted, first)
    if isinstance(routes, Mapping):
        return read_table(routes)
    return read_lists(routes) if isinstance(routes, list | tuple) else read_array(routes)


def _from_text(text: str, raw: RawSequence, wanted: _Wanted, first: int) -> NDArray[Any]:
    if wanted.kind is WireKind.LMDEPLOY:
        raise CaptureError(
            f"{wanted.what} has the text {text[:40]!r}: a key of a Ray shared store, not routes. Fetch the object by "
            "it, or start LMDeploy without enable_transfer_obj_ref"
        )
    if wanted.kind is WireKind.NEMO_RL:
        return read_envelope(text)
    if wanted.kind in (WireKind.NPY, WireKind.VLLM_NPY):
        return read_npy(read_base64(text))
    flat = read_raw(text, raw.dtype)
    rows, picks = wanted.num_tokens - 1 - first, wanted.facts.spec.top_k
    if rows < 1 and not flat.size:
        return np.zeros((0, 0, 0), flat.dtype)
    fits = [layers for layers in wanted.facts.axis_lengths if layers * rows * picks == flat.size]
    if not fits:
        raise CaptureError(
            f"{wanted.what} has {flat.size} ids without a shape; expected {rows} rows of top-{picks} over "
            f"{' or '.join(map(str, wanted.facts.axis_lengths))} layers. "
            "Check the tokens, start, num_hidden_layers and top_k"
        )
    return flat.reshape(rows, fits[0], picks)


def _present(rows_RLK: NDArray[Any], wanted: _Wanted, first: int) -> NDArray[np.bool_]:
    """Return a bool [R], False where the form says that a row was never routed."""
    absent = wanted.rules.absent
    if absent is Absent.NEVER:
        return np.ones(len(rows_RLK), np.bool_)
    if absent is Absent.MINUS_ONE:
        present: NDArray[np.bool_] = (rows_RLK != -1).any(axis=(1, 2))
        return present
    present = routed_before_zeros(rows_RLK, what=wanted.what, first_position=first)
    if wanted.kind is WireKind.PRIME_RL and len(present) and not present.any():
        raise CaptureError(
            f"{wanted.what} has nothing but zeros in its {len(present)} rows; the engine never filled them. Ask it for "
            "routes, and leave out sequences that have none"
        )
    return present


def _without_last(rows_RAK: NDArray[Any], columns: NDArray[np.int64], routed: int, wanted: _Wanted) -> NDArray[Any]:
    """Return the rows, less the one of the last token where the form lets it be dropped."""
    if len(rows_RAK) == routed or wanted.rules.last_row is LastRow.KEEP:
        return rows_RAK
    last = rows_RAK[routed, columns]
    if wanted.rules.last_row is LastRow.FILLER and (last != last[0]).any():
        raise CaptureError(
            f"{wanted.what} has routes for its last token, {last[0].tolist()} in the first layer, which no sampling "
            "engine computes; expected padding there. The rows are shifted: check the start and the tokens"
        )
    return rows_RAK[:routed]


def _refuse_row_count(rows: int, routed: int, wanted: _Wanted, first: int) -> None:
    surplus_allowed = wanted.rules.last_row is not LastRow.REFUSE
    if rows == routed or (rows == routed + 1 and surplus_allowed) or (not rows and wanted.num_tokens == 0):
        return
    raise CaptureError(
        f"{wanted.what} has {rows} rows for {wanted.num_tokens} tokens from position {first}; expected {routed}"
        f"{f' or {routed + 1}' if surplus_allowed else ''}, one for each token but the last. "
        + (
            "Rows are missing: pass start= if the request skipped a known prefix"
            if rows < routed
            else "Rows are too many: pass the tokens of prompt and response, or the start of the request"
        )
    )


def _first_position(stated: Any, start: int | None, wanted: _Wanted) -> int:
    if stated is not None and (type(stated) is not int or (start is not None and stated != start)):
        raise CaptureError(
            f"{wanted.what} states start {shown(stated)}; expected {'a position' if start is None else start}"
        )
    first = stated if stated is not None else (start or 0)
    if not 0 <= first <= max(wanted.num_tokens - 1, 0):
        raise CaptureError(
            f"{wanted.what} starts at {shown(first)}; expected a position of its {wanted.num_tokens} tokens"
        )
    return int(first)


def tokens_of(sequences: Sequence[RawSequence], token_ids: Any) -> list[NDArray[np.int32]]:
    """Return the prompt and response tokens of each sequence, int32 [T].

    Args:
        sequences: S sequences; some forms carry their tokens.
        token_ids: the caller's, [T] for one sequence or S of them, or None.

    Raises:
        CaptureError: when nobody states the tokens, or the two statements differ.
    """
    stated = _stated(token_ids, sequences)
    return [_tokens(raw, given, s) for s, (raw, given) in enumerate(zip(sequences, stated, strict=True))]


def _stated(token_ids: Any, sequences: Sequence[RawSequence]) -> list[Any]:
    """Return the caller's tokens, one entry for each sequence."""
    if token_ids is None:
        return [None] * len(sequences)
    if isinstance(token_ids, list | tuple):
        given = items_of(token_ids, "token_ids")
        if given and not isinstance(given[0], list | tuple) and not is_array(given[0]):
            given = [given]
    elif is_array(token_ids):
        array = as_array(token_ids, "token_ids")
        given = list(array) if array.ndim == 2 else [array]
    else:
        raise CaptureError(
            f"token_ids is a {type(token_ids).__name__}; expected integers [T], or a list of S such, prompt and "
            "response together"
        )
    if len(given) != len(sequences):
        raise CaptureError(f"got tokens of {len(given)} sequences for the routes of {len(sequences)}; expected as many")
    return given


def _tokens(raw: RawSequence, given: Any, sequence: int) -> NDArray[np.int32]:
    carried = _carried(raw, sequence)
    if given is None:
        if carried is None:
            raise CaptureError(
                f"the output does not carry the tokens of sequence {sequence}; pass token_ids=, prompt and response"
            )
        return carried
    stated = _as_tokens(given, sequence)
    if carried is not None and not np.array_equal(carried, stated):
        raise CaptureError(
            f"sequence {sequence} carries {len(carried)} tokens that differ from the {len(stated)} in token_ids; "
            "routes and tokens belong to different requests"
        )
    return stated


def _carried(raw: RawSequence, sequence: int) -> NDArray[np.int32] | None:
    if raw.token_ids is not None:
        return _as_tokens(raw.token_ids, sequence)
    halves = (raw.prompt_token_ids, raw.response_token_ids)
    if any(half is None for half in halves):
        return None  # one half alone says nothing about positions
    return np.concatenate([_as_tokens(half, sequence) for half in halves])


def _as_tokens(values: Any, sequence: int) -> NDArray[np.int32]:
    what = f"the tokens of sequence {sequence}"
    if isinstance(values, list | tuple):
        values = values if type(values) is list else items_of(values, what)
        for position, value in enumerate(values):
            if type(value) is not int and not isinstance(value, np.integer):
                raise CaptureError(
                    f"token {position} of sequence {sequence} is the {type(value).__name__} {shown(value)}; "
                    "expected an integer"
                )
        tokens = np.asarray(values)  # integers beyond 64 bits come as objects
    elif is_array(values):
        tokens = as_array(values, what)
    else:
        raise CaptureError(f"{what} are a {type(values).__name__}; expected a list of integers")
    if tokens.size == 0 and tokens.ndim == 1:
        return np.zeros(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > MAX_INT32:
        ids = f" from {tokens.min()} to {tokens.max()}" if tokens.size and tokens.dtype.kind in "iu" else ""
        raise CaptureError(
            f"{what} are {tokens.dtype} of shape {tokens.shape}{ids}; expected token ids [T], from 0 to {MAX_INT32}"
        )
    return tokens.astype(np.int32)


def known_engine(name: object) -> str:
    """Return the engine's name as it is listed in `ENGINES`, or nothing when none is given.

    Raises:
        CaptureError: for a name that is not listed. Letters may be large or small.
    """
    if isinstance(name, str) and (not name or name.lower() in ENGINES):
        return name.lower()
    raise CaptureError(f"engine is {shown(name)}; expected one of {', '.join(ENGINES)}, or nothing")


def named_kind(kind: WireKind, engine: str) -> WireKind:
    """Return the form, made exact by the engine's name where several engines share a container.

    Raises:
        CaptureError: when another engine writes this form.
    """
    if engine and engine not in (writers := WRITERS.get(kind, {engine: kind})):
        raise CaptureError(
            f"engine is {engine!r}, but the output has the form {kind.value}, which {' or '.join(writers)} writes; "
            "leave engine out, or pass the output of that engine"
        )
    return {**WRITERS, **REFINED}.get(kind, {}).get(engine, kind)


def require_logical_ids(kind: WireKind, engine: str, version: object) -> None:
    """Raise `CaptureError` for a version whose ids are slots of a load balancer, and for one that says nothing.

    Args:
        kind: the exact form.
        engine: as `known_engine` has it.
        version: of the engine, as the caller states it.
    """
    # vLLM's ids are logical in every version, and builds of it may state one without a number
    numberless = isinstance(version, str) and version and not re.search(r"\d", version) and engine != "vllm"
    if not isinstance(version, str) or numberless:
        raise CaptureError(f"engine_version is {shown(version)}; expected text such as '0.5.12', or nothing")
    if not version:
        return
    if not engine and kind not in WRITERS:
        raise CaptureError(
            f"engine_version is {version!r}, and neither engine= nor the output says of which engine; pass engine, one "
            f"of {', '.join(ENGINES)}"
        )
    numbers = tuple(int(n) for n in re.findall(r"\d{1,9}", version)[:3])
    if (engine or kind.value) == "sglang" and numbers < FIRST_LOGICAL_SGLANG:
        raise CaptureError(
            f"SGLang {version} captures routes after its load balancer has mapped them, so the ids are physical "
            "slots, and the mapping is not in the output; upgrade SGLang to 0.5.10 or newer"
        )
