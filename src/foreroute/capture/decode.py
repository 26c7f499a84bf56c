"""The door: what an engine handed out, as a routing trace, or an error that says why not.

One sequence at a time: its routes become an array, its rows are put at their positions and its layers on the axis of
the model. Then `RoutingTrace.from_rows` checks every id, and what looks like a failed capture is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arrays import columns_of, field_of, is_array, items_of, read_rows
from foreroute.capture.checks import refuse_frozen_rows, refuse_routed_dense, unfilled_lookups, warn_of_unused_experts
from foreroute.capture.generation import Generation
from foreroute.capture.indexers import with_indexer_choices
from foreroute.capture.logprobs import read_logprobs
from foreroute.capture.recognition import Form, RawSequence, have_all, read_output
from foreroute.capture.sampling_masks import decode_masks
from foreroute.checks import MOST_INT32, as_array, as_int32, is_whole, whole_number
from foreroute.errors import CaptureError, TraceContentError, shown
from foreroute.trace import NO_VERSION, IndexerSpec, LayerKind, RoutingSpec, RoutingTrace
from foreroute.trace.checks import recorded_rows


def decode(
    output: object,
    *,
    model: RoutingSpec,
    token_ids: Any = None,
    valid: Any = None,
    start: int | Sequence[int] = 0,
    weight_version: int | Callable[[str], int] = NO_VERSION,
    vocabulary_size: int | None = None,
    indexers: IndexerSpec | None = None,
) -> RoutingTrace:
    """Read the routes of every sequence in `output`, and where it has them its sampling masks and indexer choices.

    Args:
        output: a response of vLLM or SGLang (parsed, or JSON text or bytes), an in-process output of vLLM, a padded or
            packed batch of verl, ms-swift or SkyRL, a branch of verifiers, a list of these; or routes alone, integers
            [rows, layers, K] or [rows, layers * K] of one sequence or a list of such: an array of any library, nested
            lists, a table of data, shape and dtype, or the bytes of a `.npy` file.
        model: experts, picks and routed layers. The layer axis of the output may have these layers alone, or all
            decoder layers. Where layers that look experts up by token (`hash`) hold zeros, the trace leaves them out.
        token_ids: prompt and response tokens, integers [T] for one sequence or S of them. Needed where the output does
            not carry them; compared with those that it carries.
        valid: for routes alone: bool [rows] for one sequence or S of them, False where a row was never routed.
        start: the position of the first row, where the request skipped a known prefix
            (`routed_experts_prompt_start`, `routed_experts_start_len`), one for all sequences or one for each. Earlier
            rows are absent. A table may state its own.
        weight_version: the weights that computed the routes; or a function, such as `int`, of the name that vLLM (0.31
            and newer) and SGLang give the weights of each span of generated tokens. The rows that produced these tokens
            are then stamped, and rows of the prompt are not.
        vocabulary_size: tokens of the model; needed where the output has sampling masks.
        indexers: of the model's sparse attention, such as `hf.attach(model).indexers`; needed where the output has
            their choices.

    Returns:
        One sequence for each choice. Row p is the routing of input position p. The last token's row is absent, also
        where the output has one: an engine ends before it feeds that token, and cannot know its route. The masks are
        `trace.streams["sampling"]`, the choices `trace.streams["indexer"]`.

    Raises:
        CaptureError: when the form is unknown or damaged, rows or layers do not fit, or routes, masks or choices cannot
            be trusted.
        SpecMismatchError: when layers of the model differ in experts or picks.
    """
    return _decode(output, model, token_ids, valid, start, weight_version, vocabulary_size, indexers)[0]


def decode_generation(
    output: object,
    *,
    model: RoutingSpec,
    token_ids: Any = None,
    start: int | Sequence[int] = 0,
    weight_version: int | Callable[[str], int] = NO_VERSION,
    vocabulary_size: int | None = None,
    indexers: IndexerSpec | None = None,
) -> Generation:
    """Read routes as `decode`, whose arguments these are, and the log-probs of sampled tokens with them.

    Each answer of vLLM or SGLang in `output` must have log-probs, of the distribution that was sampled from: vLLM gives
    them under `--logprobs-mode processed_logprobs`.

    Raises:
        CaptureError: as `decode`, and when log-probs are missing, too many, of other tokens, or no numbers.
        TraceContentError: when they are no logarithms of probabilities, or a sequence has no prompt.
    """
    trace, sequences = _decode(output, model, token_ids, None, start, weight_version, vocabulary_size, indexers)
    logprobs = [read_logprobs(raw, trace.tokens(s), f"sequence {s}") for s, raw in enumerate(sequences)]
    lengths_S = trace.lengths - np.array([len(each) for each in logprobs], np.int64)
    return Generation(trace, lengths_S, np.concatenate(logprobs))


def _decode(
    output: object,
    model: RoutingSpec,
    token_ids: Any,
    valid: Any,
    start: int | Sequence[int],
    weight_version: int | Callable[[str], int],
    vocabulary_size: int | None,
    indexers: IndexerSpec | None,
) -> tuple[RoutingTrace, list[RawSequence]]:
    """Read the trace of an output, and its sequences as they were found."""
    _require_readable(model)
    form, sequences = read_output(output)
    starts = _starts(start, sequences)
    if valid is not None and form is not Form.ARRAY:
        raise CaptureError(f"valid is for routes alone, and the output has the form {form}; leave it out")
    given_tokens = _one_for_each(token_ids, len(sequences), "token_ids", "integers [T]")
    given_valid = _one_for_each(valid, len(sequences), "valid", "bools [rows]")
    tokens: list[NDArray[np.int32]] = []
    rows, valid_S, versions, unfilled_L = [], [], [], np.zeros(model.num_layers, np.bool_)
    for s, (raw, own, mask) in enumerate(zip(sequences, given_tokens, given_valid, strict=True)):
        tokens.append(_tokens(raw, own, s))
        routed = raw.valid if mask is None else as_array(mask, name=f"valid of sequence {s}", error=CaptureError)
        versions.append(_versions(raw, len(tokens[s]), weight_version, f"sequence {s}"))
        rows_TLK, valid_T, missing_L = _place(raw, routed, len(tokens[s]), form, model, starts[s], f"sequence {s}")
        rows.append(rows_TLK)
        valid_S.append(valid_T)
        unfilled_L |= missing_L
    if unfilled_L.any():
        rows = [rows_TLK[:, ~unfilled_L] for rows_TLK in rows]
        model = model.select(model.layers[layer] for layer in np.flatnonzero(~unfilled_L))
    try:
        trace = RoutingTrace.from_rows(
            model, tokens, rows, valid=valid_S, weight_versions=versions, provenance={"wire": form.value}
        )
    except TraceContentError as error:
        raise CaptureError(
            f"{error}. Ids beyond the experts are physical ids of an expert-parallel load balancer: switch it off, or "
            "upgrade the engine. Ids below 0, or an expert twice, are a buffer that was not filled, or bytes read with "
            "the wrong shape or dtype; a row that was never routed is -1 throughout, or told by valid"
        ) from error
    if any(len(each) > 1 for each in tokens) and not trace.valid_N.any():
        raise CaptureError(
            "no row of the output has a route. The capture failed, or was not asked for; a sequence that was never "
            "routed is RoutingTrace.unrouted"
        )
    refuse_frozen_rows(trace)
    warn_of_unused_experts(trace)
    if have_all([raw.sampling_mask for raw in sequences], "sampling mask"):
        trace = decode_masks(trace, sequences, vocabulary_size)
    choices = [raw.indexer_topk for raw in sequences]
    if have_all(choices, "choices of indexers"):
        trace = with_indexer_choices(trace, choices, indexers)
    return trace, sequences


def _starts(start: object, sequences: Sequence[RawSequence]) -> list[int]:
    """Return the position of the first row of each sequence: what its table states, or else what the caller does."""
    if isinstance(start, np.ndarray) and not start.ndim:
        start = start[()]
    each = items_of(start, "start") if isinstance(start, list | tuple | np.ndarray) else [start] * len(sequences)
    if len(each) != len(sequences):
        raise CaptureError(f"start has {len(each)} positions for {len(sequences)} sequences; expected one, or as many")
    starts = []
    for given, raw in zip(each, sequences, strict=True):
        given = whole_number(given, name="start", least=0, most=MOST_INT32, error=CaptureError)
        if raw.start is not None:
            stated = whole_number(raw.start, name="start of the table", least=0, most=MOST_INT32, error=CaptureError)
            if given not in (0, stated):
                raise CaptureError(f"start is {given}, and the table states {stated}; leave start out")
            given = stated
        starts.append(given)
    return starts


def _place(
    raw: RawSequence,
    valid_R: NDArray[Any] | None,
    num_tokens: int,
    form: Form,
    spec: RoutingSpec,
    start: int,
    what: str,
) -> tuple[NDArray[Any], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the rows of one sequence from position 0 on, [R, L, K]; bool [T], where one is; [L], unfilled layers."""
    if start > max(num_tokens - 1, 0):
        raise CaptureError(f"{what} starts at {start}; expected a position of its {num_tokens} tokens")
    expected = num_tokens - 1 - start  # each token but the last has a row; the last may, in routes alone and in verl
    most = expected + (form in (Form.ARRAY, Form.VERL) or raw.prompt_routes is not None)
    rows_RAK = _read(raw, expected, start, spec.top_k, what)
    count = len(rows_RAK)
    if not expected <= count <= most and (count or num_tokens):
        is_part = form == Form.VLLM and raw.prompt_routes is None
        apart = "keep prompt_routed_experts in the answer, which vLLM 0.21 returns beside; or " if is_part else ""
        raise CaptureError(
            f"{what} has {count} rows for {num_tokens} tokens from position {start}; expected {expected}"
            f"{f' or {most}' if most > expected else ''}, one for each token but the last. "
            + (
                f"Rows are missing: {apart}pass start= if the request skipped a known prefix"
                if count < expected
                else "Rows are too many: pass the tokens of prompt and response, or the start of the request"
            )
        )
    valid_T = np.zeros(num_tokens, np.bool_)
    if not count:
        return np.zeros((0, spec.num_layers, spec.top_k), spec.id_dtype), valid_T, np.zeros(spec.num_layers, np.bool_)
    if rows_RAK.shape[2] != spec.top_k:
        raise CaptureError(f"{what} has {rows_RAK.shape[2]} picks in a row; expected top_k = {spec.top_k}")
    if np.iinfo(rows_RAK.dtype).max < spec.num_experts - 1:
        # ids that were cast to a narrower type are other ids, and each row of them may still look possible
        raise CaptureError(
            f"{what} has ids of {rows_RAK.dtype}, which cannot tell {spec.num_experts} experts apart; expected "
            f"{spec.id_dtype} or a wider type. Take the routes as the engine returned them"
        )
    valid_R = np.ones(count, np.bool_) if valid_R is None else valid_R
    if valid_R.shape != (count,) or valid_R.dtype.kind != "b":
        raise CaptureError(
            f"{what} has {count} rows, and valid is {valid_R.dtype} of shape {valid_R.shape}; expected bools [rows]"
        )
    rows_RAK, valid_R = rows_RAK[:expected], valid_R[:expected]  # what stands for the last token is no route
    # The columns are chosen before rows are looked at: dense layers hold a constant, an expert twice in every row,
    # so that they are judged by a rule of their own.
    columns = columns_of(spec.layers, rows_RAK.shape[1], f"the routes of {what}")
    first = int(columns[0])
    together = np.array_equal(columns, np.arange(first, first + len(columns)))  # then they are not copied
    rows_RLK = rows_RAK[:, first : first + len(columns)] if together else rows_RAK[:, columns]
    if len(columns) < rows_RAK.shape[1]:
        dense = np.delete(np.arange(rows_RAK.shape[1]), columns)
        refuse_routed_dense(rows_RAK[:, dense][valid_R & recorded_rows(rows_RLK)], dense.tolist(), what=what)
    if not is_array(raw.routes):
        rows_RLK = _narrowed(rows_RLK, spec)
    unfilled_L = unfilled_lookups(rows_RLK, valid_R, spec, what=what)
    valid_T[start : start + len(rows_RLK)] = valid_R
    if not start:
        return rows_RLK, valid_T, unfilled_L
    placed_RLK = np.zeros((start + len(rows_RLK), *rows_RLK.shape[1:]), rows_RLK.dtype)
    placed_RLK[start:] = rows_RLK  # nobody touches the memory before it
    return placed_RLK, valid_T, unfilled_L


def _narrowed(rows_RLK: NDArray[Any], spec: RoutingSpec) -> NDArray[Any]:
    """Return ids in the type of a trace, if all are experts: what a text held is let go before the next one is read."""
    unsigned = rows_RLK.view(rows_RLK.dtype.str.replace("i", "u"))
    is_wide = rows_RLK.itemsize > spec.id_dtype.itemsize
    return rows_RLK.astype(spec.id_dtype) if is_wide and unsigned.max(initial=0) < spec.num_experts else rows_RLK


def _read(raw: RawSequence, expected: int, start: int, top_k: int, what: str) -> NDArray[Any]:
    """Return the rows of one sequence, those of its prompt joined with the others: integers [R, layers, K]."""
    if raw.prompt_routes is None:
        return read_rows(raw.routes, expected, top_k, f"the routes of {what}")
    prompt = read_rows(raw.prompt_routes, expected, top_k, f"the routes of the prompt of {what}")
    rows = read_rows(raw.routes, expected - len(prompt), top_k, f"the routes of {what}")
    length = len(prompt) if raw.prompt_token_ids is None else len(items_of(raw.prompt_token_ids, "the prompt")) - start
    if len(prompt) != length or (len(rows) and rows.shape[1:] != prompt.shape[1:]):
        raise CaptureError(
            f"{what} has routes of shape {prompt.shape} for a prompt of {length} tokens and {rows.shape} behind it; "
            "expected a row for each token of the prompt, and as many layers and picks behind it"
        )
    return np.concatenate([prompt, rows]) if len(rows) else prompt


def _versions(
    raw: RawSequence, num_tokens: int, weight_version: int | Callable[[str], int], what: str
) -> NDArray[np.int32]:
    """Return the version of each row, int32 [T]: row P - 1 + j produced generated token j, after P of the prompt."""
    spans = [] if raw.weight_versions is None else items_of(raw.weight_versions, "weight_versions")
    if not callable(weight_version):
        version = _as_version(weight_version)
        names = {shown(field_of(span, "version")) for span in spans}
        if version != NO_VERSION and len(names) > 1:
            raise CaptureError(
                f"{what} was generated under the weights {', '.join(sorted(names)[:8])}, and weight_version is "
                f"{version} for all of it; pass a function of these names, such as weight_version=int"
            )
        return np.full(num_tokens, version, np.int32)
    generated = None if raw.response_token_ids is None else len(items_of(raw.response_token_ids, "the response"))
    if generated is None or generated > num_tokens or raw.weight_versions is None:
        raise CaptureError(
            f"{what} does not say which weights produced its tokens; pass weight_version as a number, or ask an engine "
            "that returns weight_versions (/inference/v1/generate of vLLM 0.31, /generate of SGLang 0.5.23)"
        )
    versions_T, done = np.full(num_tokens, NO_VERSION, np.int32), 0
    first = num_tokens - generated - 1
    for span in spans:
        name, start, end = (field_of(span, each) for each in ("version", "start", "end"))
        if (
            not isinstance(name, str)
            or not is_whole(start)
            or not is_whole(end)
            or not done == start < end <= generated
        ):
            raise CaptureError(
                f"{what} has the span {shown(span)} of weights behind token {done}; expected names of weights, and "
                f"spans that follow each other from 0 to {generated}"
            )
        try:
            version = weight_version(name)
        except ValueError as error:
            raise CaptureError(
                f"the weights {shown(name)} have no number ({error}); pass a function that gives one"
            ) from error
        versions_T[max(first + start, 0) : first + end] = _as_version(version)
        done = end
    if done != generated:
        raise CaptureError(f"{what} states the weights of {done} of {generated} generated tokens; was the answer cut?")
    return versions_T


def _as_version(value: object) -> int:
    """Return a weight version that can be."""
    return whole_number(value, name="weight_version", least=NO_VERSION, most=MOST_INT32, error=CaptureError)


def _one_for_each(values: Any, count: int, name: str, form: str) -> list[Any]:
    """Return what the caller states, one entry for each sequence; None where nothing is stated."""
    if values is None:
        return [None] * count
    if isinstance(values, list | tuple):
        given = items_of(values, name)
        if given and not isinstance(given[0], list | tuple) and not is_array(given[0]):
            given = [given]
    elif is_array(values):
        array = as_array(values, name=name, error=CaptureError)
        given = list(array) if array.ndim == 2 else [array]
    else:
        raise CaptureError(f"{name} is a {type(values).__name__}; expected {form}, or a list of S such")
    if len(given) != count:
        raise CaptureError(f"got {name} of {len(given)} sequences for the routes of {count}; expected as many")
    return given


def _tokens(raw: RawSequence, given: Any, sequence: int) -> NDArray[np.int32]:
    """Return the tokens of one sequence, int32 [T]; those that it carries and those that are given must be equal."""
    halves = (raw.prompt_token_ids, raw.response_token_ids)
    carried = None  # one half alone says nothing about positions
    if raw.token_ids is not None:
        carried = _as_tokens(raw.token_ids, sequence)
    elif all(half is not None for half in halves):
        carried = np.concatenate([_as_tokens(half, sequence) for half in halves])
    if given is None:
        if carried is None:
            raise CaptureError(
                f"the output does not carry the tokens of sequence {sequence}; pass token_ids=, prompt and response, "
                'or ask the server for them (vLLM: "return_token_ids": true)'
            )
        return carried
    stated = _as_tokens(given, sequence)
    if carried is not None and not np.array_equal(carried, stated):
        raise CaptureError(
            f"sequence {sequence} carries {len(carried)} tokens that differ from the {len(stated)} in token_ids; "
            "routes and tokens belong to different requests"
        )
    return stated


def _as_tokens(values: Any, sequence: int) -> NDArray[np.int32]:
    """Return a list or array of any library as int32 [T], and refuse what holds no token ids."""
    what = f"the tokens of sequence {sequence}"
    if isinstance(values, list | tuple):
        values = items_of(values, what)
        if {bool, np.bool_} & set(map(type, values)):  # numpy takes a bool among integers for 0 or 1
            raise CaptureError(f"{what} hold a bool; expected integers")
    elif not is_array(values):
        raise CaptureError(f"{what} are a {type(values).__name__}; expected a list of integers")
    return as_int32(values, name=what, error=CaptureError)


def _require_readable(spec: object) -> None:
    """Refuse what is no spec, and one of layers that no engine returns, or that differ in size."""
    if not isinstance(spec, RoutingSpec):
        raise CaptureError(
            f"the model is a {type(spec).__name__}; expected a RoutingSpec: hf.attach(model).spec, "
            "foreroute.load(FILE).spec of a trace, or foreroute.adapters.checkpoint.ServedModel.at(FOLDER).spec"
        )
    spec.require_alike("a capture of an engine", "RoutingTrace.from_sequences takes its arrays, -1 behind fewer picks")
    if {layer.kind for layer in spec.layers} & {LayerKind.MTP, LayerKind.DRAFT}:
        raise CaptureError(
            f"the spec of {spec.model or 'the model'} lists MTP or draft layers; no engine returns those, "
            "pass a spec of the decoder layers alone"
        )
