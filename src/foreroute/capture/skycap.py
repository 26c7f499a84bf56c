"""Reads records of skycap (SkyRL's gateway for agents), format version 1, as its `docs/format.md` states it.

A record is a document of messages, each a node below the one it follows, and side files with arrays:

    {id}.json.zst       nodes, and which paths train which of them
    {id}.tokens.zst     token_ids, logprobs
    {id}.experts.zst    routed_experts [rows, layers, K]

The last token that a call sampled was never an input of that call, so that its row is a copy of the row before. A later
call that goes on from there puts the row in its place; a row that still equals the one before it is taken as absent. No
pixels are recorded, and no weight version. Sampling masks are not read: what they belong to is not trained.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.agents import AgentRollout, Path, entries_of, naming, path_of, rollout_of, trace_of
from foreroute.capture.arrays import MAX_TEXT, parse_text
from foreroute.checks import as_int32, is_whole, whole_number
from foreroute.errors import CaptureError, shown
from foreroute.files.regular import MOST_BYTES, read_file
from foreroute.trace import RoutingSpec

TYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "int16", "int32", "int64", "float64")}
READ = {
    "tokens": {"token_ids": ("int32", 1), "logprobs": ("float64", 1)},
    "experts": {"routed_experts": ("uint8 uint16 int16 int32", 3)},
}
"""The arrays that are read from each side file: their types and number of axes."""
MOST_WINDOW = 1 << 25
"""Bytes that a zstd frame may look back, which its decoder takes at once."""
AT_ONCE = 1 << 20
NODE_BYTES = 256
"""What a node counts on a path, beside its tokens."""
_number = partial(whole_number, least=0, error=CaptureError)


@dataclass(frozen=True)
class _Node:
    """One message: where it hangs, where its tokens and rows lie, and what speaks against training on a reply."""

    parent: int | None
    is_model: bool
    tokens: slice | None
    sampled: int
    experts: slice | None
    has_media: bool
    objection: str


def read_skycap(document: str | os.PathLike[str], *, model: RoutingSpec, weight_version: int) -> AgentRollout:
    """Read a record of skycap: every path that its samples name, with the tokens that this path trains.

    Args:
        document: `{id}.json.zst`; its side files lie beside it.
        model: experts, picks and routed layers. Routes may have these layers alone, or all decoder layers.
        weight_version: the weights that made the record, which does not say; -1 where they were several.

    Raises:
        CaptureError: when a file is missing, damaged or of another format, or holds what cannot be true.
    """
    stored = read_file(document, CaptureError, most_bytes=MAX_TEXT)
    with naming(document):
        record = parse_text(_content(stored, "the document", MAX_TEXT), name="the document")
        if not isinstance(record, Mapping) or not is_whole(version := record.get("format_version")) or version != 1:
            raise CaptureError(f"the document is {shown(record)}; expected a record of skycap with format_version 1")
        left_out: list[str] = []
        paths: list[Path] = []
        samples = _samples_of(record, left_out)
        if samples:
            arrays = _side_files(FilePath(document).parent, record)
            nodes = _nodes_of(record, arrays)
            chains = _chains(samples, nodes, arrays)
            found = (_path(*each, nodes, arrays, model, left_out) for each in chains)
            paths = [path for path in found if path is not None]
        return rollout_of(paths, left_out, weight_version)


def _chains(
    samples: list[tuple[int, list[int]]], nodes: list[_Node], arrays: Mapping[str, NDArray[Any]]
) -> list[tuple[list[int], list[int]]]:
    """Return the nodes from the first to the last of each path, and those of them that it trains."""
    room, routes = MOST_BYTES, arrays.get("routed_experts", np.zeros((0, 1, 1), np.uint8))
    token_bytes = routes.itemsize * prod(routes.shape[1:]) + 16
    trained: set[int] = set()
    chains = []
    for leaf, targets in samples:
        chain = [leaf]
        while (above := nodes[chain[-1]].parent) is not None:
            chain.append(above)
        # a small record can name many long paths
        room -= sum(NODE_BYTES + token_bytes * _size(nodes[number].tokens) for number in chain)
        if room < 0:
            raise CaptureError(f"its paths take more than {MOST_BYTES} bytes; expected those of one rollout")
        for target in targets:
            if target not in chain or not nodes[target].is_model or target in trained:
                raise CaptureError(
                    f"samples train node {target} on the path to {leaf}; expected replies of the model on this path, "
                    "and each of them once"
                )
            trained.add(target)
        chains.append((chain[::-1], targets))
    return chains


def _path(
    chain: list[int],
    targets: list[int],
    nodes: list[_Node],
    arrays: Mapping[str, NDArray[Any]],
    model: RoutingSpec,
    left_out: list[str],
) -> Path | None:
    """Return the conversation along a chain; None with a statement where it cannot be trained on."""
    left_out += [f"node {i} is not trained: {nodes[i].objection}" for i in targets if nodes[i].objection]
    kept = [i for i in targets if not nodes[i].objection]
    reason = "" if kept else "none of its replies can be trained"
    if any(nodes[i].tokens is None for i in chain):
        reason = "it has messages without tokens"
    if any(nodes[i].has_media for i in chain):
        reason = "it has images, whose pixels are not recorded, so that no forward can repeat it"
    path = None if reason else _joined(chain[: max(map(chain.index, kept)) + 1], kept, nodes, arrays, model, left_out)
    if path is None:
        left_out.append(f"the path to node {chain[-1]} is left out: {reason or 'it has no routes'}")
    return path


def _joined(
    chain: list[int],
    kept: list[int],
    nodes: list[_Node],
    arrays: Mapping[str, NDArray[Any]],
    model: RoutingSpec,
    left_out: list[str],
) -> Path | None:
    """Join tokens, rows and log-probs of a chain; None where no row has a route."""
    ends = np.cumsum([_size(nodes[number].tokens) for number in chain]).tolist()
    length, routes = ends[-1], arrays.get("routed_experts", np.zeros((0, 1, 1), np.uint8))
    spans = [nodes[number].tokens or slice(0, 0) for number in chain]
    tokens_T = as_int32(np.concatenate([arrays["token_ids"][span] for span in spans]), name="token_ids")
    rows_TAK = np.zeros((length, *routes.shape[1:]), routes.dtype)
    routed_T, is_last_T, sampled_T = np.zeros((3, length), np.bool_)
    logprobs = []
    for number, span, end in zip(chain, spans, ends, strict=True):
        node, start = nodes[number], end - _size(span)
        if node.experts is not None:
            rows_TAK[start:end], routed_T[start:end] = routes[node.experts], True
        if node.is_model and end > start:
            is_last_T[end - 1] = True
        if number in kept:
            sampled_T[end - (span.stop - node.sampled) : end] = True
            logprobs.append(arrays["logprobs"][node.sampled : span.stop])
    # it is the true one where it differs from the row before, which therefore must be there
    same_T = np.append(True, (rows_TAK[1:] == rows_TAK[:-1]).all(axis=(1, 2)) | ~routed_T[:-1])
    copied_T = routed_T & is_last_T & same_T
    copied_T[-1] = routed_T[-1] = False  # the last token was never an input
    for is_lost_T, why in (
        (~routed_T[:-1], "the record has none"),
        (copied_T, "a copy of the row before stands there"),
    ):
        if is_lost_T.any():
            count = int(is_lost_T.sum())
            left_out.append(f"the path to node {chain[-1]} has {count} rows without routes: {why}")
    trace = trace_of(model, tokens_T, rows_TAK, routed_T & ~copied_T)
    return path_of(str(chain[-1]), trace, sampled_T, logprobs, "skycap") if trace.valid_N.any() else None


def _samples_of(record: Mapping[str, Any], left_out: list[str]) -> list[tuple[int, list[int]]]:
    """Return the last node of each path that is trained, and the nodes that it trains."""
    status, samples = record.get("status"), record.get("samples")
    count = len(entries_of(record, "nodes", dict))
    if status != "finished" or samples is None:
        left_out.append(
            f"the record is left out: its status is {shown(status)}, and it has {'no ' * (samples is None)}samples; "
            "only a rollout that was finished, with samples, can be trained on"
        )
        return []
    found = []
    for row in entries_of(_object(samples, "samples"), "rows", dict):
        numbers = [row.get("leaf"), *entries_of(row, "targets", int)]
        if len(numbers) == 1:
            continue  # it trains nothing
        leaf, *targets = (_number(number, name="a node of samples", most=count - 1) for number in numbers)
        found.append((leaf, targets))
    if not found:
        left_out.append("the record is left out: its samples train no reply")
    return found


def _nodes_of(record: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[_Node]:
    """Read the nodes; slices of arrays ascend from node to node, so that no row belongs to two."""
    nodes: list[_Node] = []
    most = {"tokens": len(arrays.get("token_ids", ())), "experts": len(arrays.get("routed_experts", ()))}
    used = dict.fromkeys(most, 0)

    def part(number: int, kind: str, start: object, size: object) -> slice:
        what = f"the {kind} of node {number}"
        first = _number(start, name=f"the start of {what}", most=most[kind], least=used[kind])
        count = _number(size, name=f"the length of {what}", most=most[kind] - first)
        used[kind] = first + count
        return slice(first, first + count)

    for number, entry in enumerate(entries_of(record, "nodes", dict)):
        parent, author, held = entry.get("parent"), entry.get("author"), entry.get("tokens")
        if parent is not None:
            parent = _number(parent, name=f"the parent of node {number}", most=number - 1)
        if author not in ("client", "model") or entry.get("id") != number:
            raise CaptureError(
                f"node {number} has the id {shown(entry.get('id'))} and the author {shown(author)}; expected its "
                "number, and client or model"
            )
        is_model, held = author == "model", _object(held, f"tokens of node {number}")
        tokens = experts = None
        sampled = 0
        if entry.get("tokens") is not None:
            tokens = part(number, "tokens", held.get("offset"), held.get("length"))
            if held.get("experts_offset") is not None and held.get("experts_rows") != 0:
                rows = part(number, "experts", held["experts_offset"], held.get("experts_rows"))
                experts = rows if _size(rows) == _size(tokens) else None
            if is_model:
                begins = held.get("sampled_start")
                sampled = tokens.start + _number(begins, name=f"sampled_start of node {number}", most=_size(tokens))
        objection = ""
        if is_model:
            calls = entries_of(entry, "calls", dict)
            if not calls:
                raise CaptureError(f"node {number} is a reply without a call")
            if _was_cut(record, calls[0]):
                objection = "its log-probs are of a truncated distribution, whose masks are not read"
        if held.get("has_logprobs") is not True:
            objection = "it has no log-probs"
        if tokens is None or sampled >= tokens.stop:
            objection = "it has no sampled tokens"
        nodes.append(_Node(parent, is_model, tokens, sampled, experts, bool(held.get("media")), objection))
    return nodes


def _was_cut(record: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Say whether log-probs are of what top-p, top-k or min-p had left."""
    capture = _object(record.get("capture"), "capture")
    asked = {**_object(call.get("sampling"), "sampling")}
    asked |= _object(capture.get("sampling_overrides"), "sampling_overrides")
    leaves_all = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
    is_cut = any(asked.get(name) not in values for name, values in leaves_all.items())
    return is_cut and capture.get("logprobs_mode") == "processed_logprobs"


def _side_files(folder: FilePath, record: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Read the arrays of all side files, by their names."""
    found: dict[str, NDArray[Any]] = {}
    for kind, stated in _object(record.get("sidecars"), "sidecars").items():
        stated = _object(stated, f"the side file {kind:.40}")
        name, shapes = stated.get("file"), _object(stated.get("arrays"), "arrays")
        if not isinstance(name, str) or not name or FilePath(name).name != name:
            raise CaptureError(f"a side file is named {shown(name)}; expected the name of a file in the same folder")
        places = {each: _place_of(each, place) for each, place in shapes.items()}
        size = max((start + dtype.itemsize * prod(shape) for dtype, shape, start in places.values()), default=0)
        if size > MOST_BYTES:
            raise CaptureError(f"{name:.80} is said to have {size} bytes; expected {MOST_BYTES} at most")
        content = _content(read_file(folder / name, CaptureError), name, size)
        if len(content) != size:
            raise CaptureError(f"{name:.80} has {len(content)} bytes, and its arrays need {size}; copy it again")
        for each, (types, axes) in READ.get(kind, {}).items():
            dtype, shape, start = places.get(each, (None, (), 0))
            if dtype is None or dtype.name not in types.split() or len(shape) != axes:
                raise CaptureError(f"{each} of {name:.80} has {dtype} {shape}; expected {types} with {axes} axes")
            found[each] = np.frombuffer(content, dtype, prod(shape), start).reshape(shape)
    if len(found.get("token_ids", ())) != len(found.get("logprobs", ())):
        raise CaptureError(f"there are {len(found['token_ids'])} tokens and {len(found['logprobs'])} log-probs")
    return found


def _place_of(name: str, stated: object) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return the type, shape and first byte of an array as the document states them."""
    place = _object(stated, f"the array {name:.40}")
    dtype, shape, start = place.get("dtype"), entries_of(place, "shape", int), place.get("offset")
    if not isinstance(dtype, str) or dtype not in TYPES or len(shape) > 3:
        raise CaptureError(
            f"the array {name:.40} is {shown(dtype)} of shape {shown(shape)}; expected {', '.join(TYPES)}"
        )
    sizes = [_number(size, name="an axis", most=MOST_BYTES) for size in shape]
    first = _number(start, name=f"the offset of {name:.40}", most=MOST_BYTES)
    if first % 8:
        raise CaptureError(f"{name:.40} begins at byte {first}; expected a multiple of 8")
    return TYPES[dtype], tuple(sizes), first


def _content(stored: bytes, name: str, most: int) -> bytes:
    """Return what zstd frames hold, of which none needs to state its size; never more than `most` bytes and a bit."""
    import zstandard

    decompressor, parts, size = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW), [], 0
    try:
        with decompressor.stream_reader(BytesIO(stored), read_across_frames=True) as reader:
            while size <= most and (part := reader.read(min(AT_ONCE, most + 1 - size))):
                parts.append(part)
                size += len(part)
    except zstandard.ZstdError as error:
        raise CaptureError(f"{name:.80} is no zstd frame that can be read ({error}); was it cut?") from error
    if size > most:
        raise CaptureError(f"{name:.80} holds more than {most} bytes; expected that at most")
    return b"".join(parts)


def _object(value: object, what: str) -> Mapping[str, Any]:
    """Return a JSON object, an empty one where there is none."""
    if value is not None and not isinstance(value, Mapping):
        raise CaptureError(f"{what} is {shown(value)}; expected an object")
    return value or {}


def _size(span: slice | None) -> int:
    """Return the length of a slice; 0 for none."""
    return 0 if span is None else int(span.stop - span.start)
