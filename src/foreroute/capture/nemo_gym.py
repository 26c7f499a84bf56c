"""Reads token ids that NeMo Gym captured (`token_id_capture`, schema version 1): one line for each call of a rollout.

    <rollout>.tokens.jsonl         prompt, generation, log-probs and routes of each call, and the call it goes on from
    <rollout>.tokens.state.json    whether the rollout is frozen, and the SHA-256 of each line
    <rollout>.tokens.incomplete    there when a call was lost
    <rollout>.tokens.intents       the calls that were begun

Calls are joined by the parent that each names, whatever the order of lines, and only when its prompt begins with all
tokens of this parent. Calls of one parent with one prompt are retries, of which the agent saw one.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from math import prod
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.agents import (
    AgentRollout,
    Path,
    WeightVersion,
    entries_of,
    naming,
    path_of,
    rollout_of,
    trace_of,
    version_of,
)
from foreroute.capture.arrays import as_integers, parse_text, read_base64
from foreroute.checks import as_int32, is_whole
from foreroute.errors import CaptureError, shown
from foreroute.files.regular import MOST_BYTES, as_path, read_file
from foreroute.trace import RoutingSpec, RoutingTrace, extended

SUFFIX = ".tokens.jsonl"
DOMAIN = b"nemo-gym-tokens"
MOST_TOKENS = 1 << 28
"""Tokens of all calls together: prompts that add to each other make many of a few."""
ENVELOPE = re.compile(r"nrlre1:int(8|16|32):([1-9]\d{0,11})x([1-9]\d{0,11})x([1-9]\d{0,11}):", re.ASCII)
"""NeMo RL's, as in `nrlre1:int16:5x3x2:` with base64 behind it."""


@dataclass(eq=False)
class _Call:
    """One call: the tokens of its prompt and generation, the call that it goes on from, and the routes of all these."""

    name: str
    record: Mapping[str, Any]
    tokens_T: NDArray[np.int32]
    prompt: int
    parent: _Call | None
    is_trained: bool
    has_children: bool = False
    trace: RoutingTrace = field(init=False)


def read_nemo_gym(
    entries: str | os.PathLike[str], *, model: RoutingSpec, weight_version: WeightVersion
) -> AgentRollout:
    """Read a rollout that NeMo Gym has captured and frozen: a sequence for each chain of its calls.

    A call that several chains share is trained on the first of them. A retry that no call goes on from is left out.
    Lines do not say how they were sampled: their log-probs must be at the trainer's temperature, of all tokens.

    Args:
        entries: `<rollout>.tokens.jsonl`; the files beside it are looked at.
        model: experts, picks and routed layers. Routes may have these layers alone, or all decoder layers.
        weight_version: the weights that made the rollout, which it does not say: a whole number where they were the
            same for all of it, else a function of a call (its line, told by its `created_at`).

    Raises:
        CaptureError: when a file is missing, damaged or of another schema, or holds what cannot be true.
    """
    path = as_path(entries, CaptureError)
    if not path.name.endswith(SUFFIX):
        raise CaptureError(f"{path} is named otherwise than <rollout>{SUFFIX}; pass that file of NeMo Gym's capture")
    content = read_file(path, CaptureError)
    state_path = path.with_suffix(".state.json")
    state = parse_text(read_file(state_path, CaptureError), name=str(state_path))
    with naming(path):
        records = _records(content, state, path.name.removesuffix(SUFFIX))
        left_out = _unfinished(path, state, records)
        if left_out:
            return rollout_of([], left_out)
        calls = _join_calls(records, left_out)
        _drop_retries(calls, left_out)
        _route(calls, model, weight_version)
        found = [each for end in _ends(calls) if (each := _path(end, left_out)) is not None]
        return rollout_of(found, left_out)


def _records(content: bytes, state: object, rollout: str) -> dict[str, Mapping[str, Any]]:
    """Return the line of each call, as the index of the store has it."""
    index = state.get("entry_digests") if isinstance(state, Mapping) else None
    size = state.get("indexed_size") if isinstance(state, Mapping) else None
    if not isinstance(index, Mapping) or size != len(content):
        raise CaptureError(
            f"it has {len(content)} bytes, and its state is {shown(state)}; expected the entry_digests of a file of "
            "indexed_size bytes. Was it cut, or is the rollout going on?"
        )
    records: dict[str, Mapping[str, Any]] = {}
    for number, line in enumerate(content.splitlines()):
        record = parse_text(line, name=f"line {number + 1}")
        name = record.get("model_call_id") if isinstance(record, Mapping) else None
        schema = record.get("schema_version", 1) if isinstance(record, Mapping) else None
        if not isinstance(name, str) or not is_whole(schema) or schema != 1 or record.get("rollout_id") != rollout:
            raise CaptureError(
                f"line {number + 1} is {shown(record)}; expected a call of the rollout {rollout:.40} with "
                "schema_version 1"
            )
        if index.get(name) != hashlib.sha256(line.strip()).hexdigest():
            raise CaptureError(f"line {number + 1}, call {name:.40}, is not the one that the state file has; copy both")
        records[name] = record
    if len(records) != len(index):
        raise CaptureError(f"{len(records)} of {len(index)} calls of the state file are there; was the file cut?")
    return records


def _unfinished(path: FilePath, state: Mapping[str, Any], records: Mapping[str, Any]) -> list[str]:
    """Say why the rollout cannot be trained on, if it cannot."""
    begun, marker = (path.with_suffix(suffix) for suffix in (".intents", ".incomplete"))
    intents = read_file(begun, CaptureError).decode(errors="replace").split() if begun.exists() else []
    lost = [name for name in intents if name not in records]
    reasons = [
        (state.get("frozen") is not True, "it was not frozen, and calls may follow"),
        (state.get("incomplete") is not False or marker.exists(), "it is marked as incomplete: a call was lost"),
        (bool(lost), f"{len(lost)} calls were begun and not recorded, such as {shown(lost[:1])}"),
        (not records, "it has no calls"),
    ]
    return [f"the rollout is left out: {reason}" for applies, reason in reasons if applies]


def _join_calls(records: Mapping[str, Mapping[str, Any]], left_out: list[str]) -> list[_Call]:
    """Return the calls, parents before children: what each adds to the tokens of its parent is checked."""
    parents = {name: record.get("parent_call_id") for name, record in sorted(records.items())}
    known = {name: [each] if isinstance(each, str) and each in records else [] for name, each in parents.items()}
    try:
        order = [*TopologicalSorter(known).static_order()]
    except CycleError as error:
        raise CaptureError(f"calls are parents of each other in a circle: {shown(error.args[1])}") from error
    calls: dict[str, _Call] = {}
    room = MOST_TOKENS
    for name in order:
        call = _call(name, records[name], calls, left_out)
        if call is not None:
            calls[name] = call
            room -= len(call.tokens_T)
        if room < 0:
            raise CaptureError(f"its calls have more than {MOST_TOKENS} tokens together; expected those of one rollout")
    return list(calls.values())


def _call(name: str, record: Mapping[str, Any], calls: Mapping[str, _Call], left_out: list[str]) -> _Call | None:
    """Return one call with its whole prompt; None with a statement where it adds to a prompt that is not there."""
    what = f"call {name:.40}"
    own, generated = (
        as_int32(entries_of(record, each, int), name=f"{each} of {what}")
        for each in ("prompt_token_ids", "generation_token_ids")
    )
    resolution, parent_name = record.get("parent_resolution"), record.get("parent_call_id")
    if resolution not in ("root", "resolved", "unresolved", None) or (parent_name is None) == (
        resolution == "resolved"
    ):
        raise CaptureError(
            f"{what} has the parent {shown(parent_name)}, {shown(resolution)}; expected the name of a call where it is "
            "resolved, and none elsewhere"
        )
    parent = calls.get(parent_name) if isinstance(parent_name, str) else None
    why = "" if resolution in ("root", "resolved") else "what it goes on from was not found when it was made"
    if resolution == "resolved" and parent is None:
        why = f"the call {shown(parent_name)}, which it goes on from, is not there"
    if record.get("prompt_is_delta", False) is not False:
        if parent is None:
            left_out.append(f"{what} is left out: it holds what its prompt adds to another, and {why}")
            return None
        own = np.concatenate([parent.tokens_T, own])
    elif parent is not None and not np.array_equal(own[: len(parent.tokens_T)], parent.tokens_T):
        parent, why = None, f"its prompt does not begin with the tokens of {shown(parent_name)}"
    if why:
        left_out.append(f"{what} begins a sequence of its own: {why}")
    tokens_T = np.concatenate([own, generated])
    stated = record.get("cum_len"), record.get("digest")
    if (stated[0] is not None and stated[0] != len(tokens_T)) or stated[1] not in (None, _digest(tokens_T)):
        raise CaptureError(f"{what} has {len(tokens_T)} tokens that are not those of its cum_len and digest")
    is_trained = bool(len(own) and len(generated))
    if not is_trained:
        left_out.append(f"{what} is not trained: it has {len(own)} tokens of a prompt and {len(generated)} generated")
    if parent is not None:
        parent.has_children = True
    return _Call(name, record, tokens_T, len(own), parent, is_trained)


def _digest(tokens_T: NDArray[np.int32]) -> str:
    """Return Gym's digest of a sequence: SHA-256 of its count and ids as 64-bit numbers, big-endian."""
    head = struct.pack(">BQ", 1, len(tokens_T)) if len(tokens_T) else b""
    return hashlib.sha256(DOMAIN + head + tokens_T.astype(">u8").tobytes()).hexdigest()


def _drop_retries(calls: list[_Call], left_out: list[str]) -> None:
    """Drop calls that have the parent and the prompt of another and that no call goes on from."""
    asked = [(call.parent, call.tokens_T[: call.prompt].tobytes()) for call in calls]
    times = Counter(each for each, call in zip(asked, calls, strict=True) if call.is_trained)
    for each, call in zip(asked, calls, strict=True):
        if times[each] > 1 and call.is_trained and not call.has_children:
            call.is_trained = False
            left_out.append(
                f"call {call.name:.40} is not trained: another has its prompt, no call goes on from it, and the agent "
                "may not have seen it"
            )


def _ends(calls: list[_Call]) -> list[_Call]:
    """Return the calls that are trained and that no other such call goes on from, in the order of their names."""
    goes_on: set[_Call] = set()
    ends = []
    for call in reversed(calls):  # children before parents
        if call.parent is not None and (call in goes_on or call.is_trained):
            goes_on.add(call.parent)
        if call.is_trained and call not in goes_on:
            ends.append(call)
    return sorted(ends, key=lambda call: call.name)


def _route(calls: list[_Call], model: RoutingSpec, weight_version: WeightVersion) -> None:
    """Give each call the routes that were captured with it."""
    room = MOST_BYTES
    for call in calls:  # parents before children
        room -= len(call.tokens_T) * model.num_layers * model.top_k
        if room < 0:
            raise CaptureError(f"its chains take more than {MOST_BYTES} bytes; expected those of one rollout")
        call.trace = _capture(call, model, weight_version)


def _path(end: _Call, left_out: list[str]) -> Path | None:
    """Return the chain that ends in a call; None with a statement where it has no routes."""
    chain = [end]
    while (parent := chain[-1].parent) is not None:
        chain.append(parent)
    # a row that an earlier call brought stays, with its weights
    trace = extended(*(call.trace for call in reversed(chain)))
    missing = int((~trace.valid_N[:-1]).sum())
    if missing == len(end.tokens_T) - 1:
        left_out.append(f"the chain to call {end.name:.40} is left out: it has no routes")
        return None
    if missing:
        left_out.append(f"the chain to call {end.name:.40} has {missing} rows without routes: no call has them")
    sampled_T, logprobs = np.zeros(len(end.tokens_T), np.bool_), []
    for call in reversed(chain):
        if call.is_trained:
            call.is_trained = False  # on other chains
            sampled_T[call.prompt : len(call.tokens_T)] = True
            logprobs.append(_logprobs(call))
    return path_of(end.name, trace.with_provenance(wire="nemo-gym"), sampled_T, logprobs)


def _capture(call: _Call, model: RoutingSpec, weight_version: WeightVersion) -> RoutingTrace:
    """Return the routes of one call."""
    routes, length = call.record.get("routed_experts"), len(call.tokens_T)
    if routes is None:
        return RoutingTrace.unrouted(model, [call.tokens_T])
    with naming(f"the routes of call {call.name:.40}"):
        rows = _routes(routes)
        if len(rows) not in (length, length - 1):
            raise CaptureError(f"{len(rows)} rows for {length} tokens; expected one for each, or for all but the last")
        valid = ~(rows == -1).all(axis=(1, 2))
        valid[length - 1 :] = False  # the last token was never an input
        trace = trace_of(model, call.tokens_T, rows, valid)
    return trace.with_weight_version(version_of(call.record, weight_version))


def _logprobs(call: _Call) -> NDArray[np.float64]:
    """Return those of the generated tokens, float64 [R]."""
    values = entries_of(call.record, "generation_log_probs", int, float)
    if len(values) != len(call.tokens_T) - call.prompt:
        raise CaptureError(
            f"call {call.name:.40} has {len(values)} log-probs for {len(call.tokens_T) - call.prompt} tokens"
        )
    try:
        return np.array(values, np.float64)
    except OverflowError as error:
        raise CaptureError(f"a log-prob of call {call.name:.40} is no number ({error})") from error


def _routes(value: object) -> NDArray[Any]:
    """Read NeMo RL's envelope or nested lists: integers [rows, layers, K], -1 where nothing was routed."""
    if not isinstance(value, str):
        rows = as_integers(value, "the nested lists")
        if rows.ndim != 3:
            raise CaptureError(f"nested lists of shape {rows.shape}; expected [rows, layers, K]")
        return rows
    head = ENVELOPE.match(value)
    if head is None:
        raise CaptureError(f"a text that begins with {shown(value[:60])}; expected nrlre1:int16:5x3x2: and base64")
    data, shape = read_base64(value[head.end() :], "they"), tuple(map(int, head.groups()[1:]))
    dtype = np.dtype(f"<i{int(head[1]) // 8}")
    if len(data) != dtype.itemsize * prod(shape):
        raise CaptureError(f"{len(data)} bytes for {dtype} of shape {shape}; were they cut?")
    return np.frombuffer(data, dtype).reshape(shape)
