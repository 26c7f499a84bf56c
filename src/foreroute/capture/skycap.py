"""Reads records of skycap (SkyRL's gateway for agents), format version 1, as its `docs/format.md` states it.

A record is a document of messages, each a node below the one it follows, and side files with arrays:

    {id}.json.zst            nodes, and which paths train which of them
    {id}.tokens.zst          token_ids, logprobs
    {id}.experts.zst         routed_experts [rows, layers, K]
    {id}.sampling_mask.zst   ids, offsets

The last token that a call sampled was never an input of that call, so that its row is a copy of the row before. A later
call that goes on from there puts the row in its place; a row that still equals the one before it is taken as absent. No
pixels are recorded, and no weight version.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
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
    number_of,
    path_of,
    rollout_of,
    trace_of,
    version_of,
)
from foreroute.capture.arrays import MAX_TEXT, parse_text
from foreroute.capture.sampling_masks import with_masks
from foreroute.checks import as_int32, check_number, is_whole
from foreroute.errors import CaptureError, shown
from foreroute.files.regular import MOST_BYTES, read_file
from foreroute.trace import NO_VERSION, RoutingSpec
from foreroute.trace.checks import ascending

TYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "int16", "int32", "int64", "float64")}
READ = {
    "tokens": {"token_ids": ("int32", 1), "logprobs": ("float64", 1)},
    "experts": {"routed_experts": ("uint8 uint16 int16 int32", 3)},
    "sampling_mask": {"ids": ("int32", 1), "offsets": ("int64", 1)},
}
"""The arrays that are read from each side file: their types and number of axes."""
MOST_WINDOW = 1 << 25
"""Bytes that a zstd frame may look back, which its decoder takes at once."""
AT_ONCE = 1 << 20
NODE_BYTES = 256
"""Bytes that a node takes on a path, beside its tokens."""


@dataclass(frozen=True)
class _Node:
    """One message: where it hangs, the call that made it first, and where its tokens, rows and masks lie."""

    parent: int | None
    is_model: bool
    call: Mapping[str, Any]
    tokens: slice | None
    sampled: int
    has_logprobs: bool
    experts: slice | None
    masks: slice | None
    has_media: bool


def read_skycap(
    document: str | os.PathLike[str],
    *,
    model: RoutingSpec,
    weight_version: WeightVersion,
    vocabulary_size: int | None = None,
    temperature: float = 1.0,
) -> AgentRollout:
    """Read a record of skycap: every path that its samples name, with the tokens that this path trains.

    Args:
        document: `{id}.json.zst`; its side files lie beside it.
        model: experts, picks and routed layers. Routes may have these layers alone, or all decoder layers.
        weight_version: the weights that made the record, which does not say: a whole number where they were the same
            for all of it, else a function of a call (an entry of a node's `calls`, told by its `t_start`).
        vocabulary_size: tokens of the model; needed where the record has sampling masks.
        temperature: that the trainer divides logits by; replies whose log-probs are at another one are left out.

    Raises:
        CaptureError: when a file is missing, damaged or of another format, or holds what cannot be true.
    """
    check_number(temperature, name="temperature", below=math.inf, error=CaptureError)
    stored = read_file(document, CaptureError, most_bytes=MAX_TEXT)
    with naming(document):
        record = parse_text(_content(stored, "the document", MAX_TEXT), name="the document")
        if not isinstance(record, Mapping) or not is_whole(version := record.get("format_version")) or version != 1:
            raise CaptureError(f"the document is {shown(record)}; expected a record of skycap with format_version 1")
        left_out: list[str] = []
        samples = _samples_of(record, left_out)
        if not samples:
            return rollout_of([], left_out)
        arrays = _side_files(FilePath(document).parent, record)
        paths = _Paths(record, arrays, model, weight_version, vocabulary_size, temperature, left_out)
        return rollout_of([path for each in samples if (path := paths.to(*each)) is not None], left_out)


class _Paths:
    """The paths of a record, whose nodes are put together."""

    def __init__(
        self,
        record: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]],
        model: RoutingSpec,
        weight_version: WeightVersion,
        vocabulary_size: int | None,
        temperature: float,
        left_out: list[str],
    ) -> None:
        self.nodes, self.arrays, self.model, self.left_out = _nodes_of(record, arrays), arrays, model, left_out
        self.capture, self.weight_version = _object(record.get("capture"), "capture"), weight_version
        self.temperature = temperature
        self.vocabulary_size = vocabulary_size if any(node.masks for node in self.nodes) else 0
        if self.vocabulary_size is None:
            raise CaptureError("it has sampling masks, and the vocabulary is not known; pass vocabulary_size=")
        self.trained: set[int] = set()
        self.room = MOST_BYTES
        # The call that computed the rows of a node: its own, or for a message of the client that of the first reply.
        # The row of a reply's last token is that of the calls that go on from there.
        self.caller: list[int | None] = [None] * len(self.nodes)
        self.next_callers: list[set[int]] = [set() for _ in self.nodes]
        reply_above: list[int | None] = []
        for number, node in enumerate(self.nodes):
            at = node.parent
            reply_above.append(at if at is None or self.nodes[at].is_model else reply_above[at])
            if not node.is_model:
                continue
            self.caller[number], before = number, reply_above[number]
            if before is not None and node.experts is not None:
                self.next_callers[before].add(number)
            while at is not None and self.caller[at] is None:
                self.caller[at], at = number, self.nodes[at].parent

    def to(self, leaf: int, targets: list[int]) -> Path | None:
        """Return the conversation that ends in a node; None with a statement where it cannot be trained on."""
        chain = [leaf]
        while (above := self.nodes[chain[-1]].parent) is not None:
            chain.append(above)
        self._take(len(chain) * NODE_BYTES)
        chain.reverse()
        place = {number: i for i, number in enumerate(chain)}
        for target in targets:
            if target not in place or not self.nodes[target].is_model or target in self.trained:
                raise CaptureError(
                    f"samples train node {target} on the path to {leaf}; expected replies of the model on this path, "
                    "and each of them once"
                )
            self.trained.add(target)
        kept = {target for target in targets if self._can_train(target)}
        reason = self._objection([self.nodes[i] for i in chain], kept)
        if not reason:
            path = self._join_path(chain[: max(place[target] for target in kept) + 1], kept)
            if path is not None:
                return path
            reason = "it has no routes"
        self.left_out.append(f"the path to node {leaf} is left out: {reason}")
        return None

    def _can_train(self, target: int) -> bool:
        """Say whether a reply can be trained on; what speaks against it is stated."""
        node, why = self.nodes[target], ""
        if node.tokens is None or node.sampled >= node.tokens.stop:
            why = "it has no sampled tokens"
        elif not node.has_logprobs:
            why = "it has no log-probs"
        else:
            why = self._objection_to_logprobs(node)
        if why:
            self.left_out.append(f"node {target} is not trained: {why}")
        return not why

    def _objection_to_logprobs(self, node: _Node) -> str:
        """Say why log-probs are of another distribution than a trainer scores on; "" where they are not."""
        asked: dict[str, object] = {}
        if self.capture.get("logprobs_mode") == "processed_logprobs":  # others are of what the model gave
            asked |= _object(node.call.get("sampling"), "sampling")
            asked |= _object(self.capture.get("sampling_overrides"), "sampling_overrides")
        at = 1.0 if asked.get("temperature") is None else asked["temperature"]
        if at != self.temperature:
            return f"its log-probs are at the temperature {shown(at)}; the trainer scores at {self.temperature:g}"
        leaves_all = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
        if node.masks is None and any(asked.get(name) not in values for name, values in leaves_all.items()):
            return "its log-probs are of a truncated distribution, and its masks were not recorded"
        return ""

    def _objection(self, nodes: list[_Node], kept: set[int]) -> str:
        """Say why nothing on a path can be trained on; "" where something can."""
        if any(node.has_media for node in nodes):
            return "it has images, whose pixels are not recorded, so that no forward can repeat it"
        if any(node.tokens is None for node in nodes):
            return "it has messages without tokens"
        return "" if kept else "none of its replies can be trained"

    def _join_path(self, chain: list[int], kept: set[int]) -> Path | None:
        """Join tokens, rows, versions, masks and log-probs of a chain; None where no row has a route."""
        nodes = [self.nodes[number] for number in chain]
        spans = [node.tokens or slice(0, 0) for node in nodes]
        ends = np.cumsum([span.stop - span.start for span in spans]).tolist()
        length, routes = ends[-1], self.arrays.get("routed_experts", np.zeros((0, 1, 1), np.uint8))
        self._take(length * (routes.itemsize * prod(routes.shape[1:]) + 16))
        tokens_T = as_int32(np.concatenate([self.arrays["token_ids"][span] for span in spans]), name="token_ids")
        rows_TAK = np.zeros((length, *routes.shape[1:]), routes.dtype)
        routed_T, copied_T, sampled_T, masked_T = np.zeros((4, length), np.bool_)
        versions_T, counts_T = np.full(length, NO_VERSION, np.int32), np.zeros(length, np.int64)
        logprobs, ids = [], [np.zeros(0, np.int32)]
        for number, node, span, end in zip(chain, nodes, spans, ends, strict=True):
            start = end - (span.stop - span.start)
            versions_T[start:end] = self._version({self.caller[number]})
            if node.experts is not None:
                rows_TAK[start:end], routed_T[start:end] = routes[node.experts], True
            if node.is_model and end > start:
                versions_T[end - 1] = self._version(self.next_callers[number])
                # it is the true one where it differs from the row before, which therefore must be there
                is_compared = bool(self.next_callers[number]) and end > 1 and routed_T[end - 2]
                copied_T[end - 1] = not is_compared or bool((rows_TAK[end - 1] == rows_TAK[end - 2]).all())
            if number in kept:
                first = end - (span.stop - node.sampled)
                sampled_T[first:end] = True
                logprobs.append(self.arrays["logprobs"][node.sampled : span.stop])
                if node.masks is not None:
                    if first < 1 or node.masks.stop - node.masks.start != end - first:
                        raise CaptureError(
                            f"node {number} has {node.masks.stop - node.masks.start} sampling masks; expected one for "
                            f"each of its {end - first} sampled tokens"
                        )
                    offsets = self.arrays["offsets"][node.masks.start : node.masks.stop + 1]
                    masked_T[first - 1 : end - 1], counts_T[first - 1 : end - 1] = True, np.diff(offsets)
                    ids.append(self.arrays["ids"][offsets[0] : offsets[-1]])
        end_name = str(chain[-1])
        copied_T &= routed_T
        copied_T[-1] = routed_T[-1] = False  # the last token was never an input
        for count, why in (
            (int((~routed_T[:-1]).sum()), "the record has none"),
            (int(copied_T.sum()), "a copy of the row before stands there"),
        ):
            if count:
                self.left_out.append(f"the path to node {end_name} has {count} rows without routes: {why}")
        trace = trace_of(self.model, tokens_T, rows_TAK, routed_T & ~copied_T)
        versions_N = np.where(trace.valid_N, versions_T, np.int32(NO_VERSION))
        trace = replace(trace, weight_versions_N=versions_N).with_provenance(wire="skycap")
        if self.vocabulary_size:
            trace = with_masks(trace, self.vocabulary_size, masked_T, counts_T, np.concatenate(ids))
        return path_of(end_name, trace, sampled_T, logprobs) if trace.valid_N.any() else None

    def _take(self, size: int) -> None:
        """Count what all paths take together, before it is taken: a small record can name many long paths."""
        self.room -= size
        if self.room < 0:
            raise CaptureError(f"its paths take more than {MOST_BYTES} bytes; expected those of one rollout")

    def _version(self, callers: set[int] | set[int | None]) -> int:
        """Return the weights of these calls; `NO_VERSION` where there is none, or they are of several."""
        if not callable(self.weight_version):
            return version_of({}, self.weight_version)
        stated = {version_of(self.nodes[i].call, self.weight_version) for i in callers if i is not None}
        return stated.pop() if len(stated) == 1 else NO_VERSION


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
        leaf, *targets = (number_of(number, name="a node of samples", most=count - 1) for number in numbers)
        found.append((leaf, targets))
    if not found:
        left_out.append("the record is left out: its samples train no reply")
    return found


def _nodes_of(record: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[_Node]:
    """Read the nodes; slices of arrays ascend from node to node, so that no row belongs to two."""
    nodes: list[_Node] = []
    most = {
        "tokens": len(arrays.get("token_ids", ())),
        "experts": len(arrays.get("routed_experts", ())),
        "mask": max(len(arrays.get("offsets", ())) - 1, 0),
    }
    used = dict.fromkeys(most, 0)

    def part(number: int, array: str, start: object, size: object) -> slice:
        what = f"the {array} of node {number}"
        first = number_of(start, name=f"the start of {what}", most=most[array], least=used[array])
        count = number_of(size, name=f"the length of {what}", most=most[array] - first)
        used[array] = first + count
        return slice(first, first + count)

    for number, entry in enumerate(entries_of(record, "nodes", dict)):
        parent, author, held = entry.get("parent"), entry.get("author"), entry.get("tokens")
        if parent is not None:
            parent = number_of(parent, name=f"the parent of node {number}", most=number - 1)
        if author not in ("client", "model") or entry.get("id") != number:
            raise CaptureError(
                f"node {number} has the id {shown(entry.get('id'))} and the author {shown(author)}; expected its "
                "number, and client or model"
            )
        is_model = author == "model"
        calls: list[Any] = entries_of(entry, "calls", dict) if is_model else [{}]
        if not calls:
            raise CaptureError(f"node {number} is a reply without a call")
        tokens = experts = masks = None
        sampled, has_logprobs, has_media = 0, False, False
        if held is not None:
            held = _object(held, f"tokens of node {number}")
            tokens = part(number, "tokens", held.get("offset"), held.get("length"))
            if held.get("experts_offset") is not None and held.get("experts_rows") != 0:
                rows = part(number, "experts", held["experts_offset"], held.get("experts_rows"))
                experts = rows if _size(rows) == _size(tokens) else None
            if held.get("mask_offset") is not None and held.get("mask_rows") != 0:
                masks = part(number, "mask", held["mask_offset"], held.get("mask_rows"))
            if is_model:
                begins = held.get("sampled_start")
                sampled = tokens.start + number_of(begins, name=f"sampled_start of node {number}", most=_size(tokens))
            has_logprobs, has_media = held.get("has_logprobs") is True, bool(held.get("media"))
        nodes.append(_Node(parent, is_model, calls[0], tokens, sampled, has_logprobs, experts, masks, has_media))
    return nodes


def _side_files(folder: FilePath, record: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Read the arrays of all side files, by their names."""
    found: dict[str, NDArray[Any]] = {}
    for sidecar, stated in _object(record.get("sidecars"), "sidecars").items():
        stated = _object(stated, f"the side file {sidecar:.40}")
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
        for each, (types, axes) in READ.get(sidecar, {}).items():
            dtype, shape, start = places.get(each, (None, (), 0))
            if dtype is None or dtype.name not in types.split() or len(shape) != axes:
                raise CaptureError(f"{each} of {name:.80} has {dtype} {shape}; expected {types} with {axes} axes")
            found[each] = np.frombuffer(content, dtype, prod(shape), start).reshape(shape)
    if len(found.get("token_ids", ())) != len(found.get("logprobs", ())):
        raise CaptureError(f"there are {len(found['token_ids'])} tokens and {len(found['logprobs'])} log-probs")
    if "offsets" in found and not ascending(found["offsets"], len(found["ids"])):
        raise CaptureError("offsets of sampling masks do not ascend from 0 to the number of their ids")
    return found


def _place_of(name: str, stated: object) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return the type, shape and first byte of an array as the document states them."""
    place = _object(stated, f"the array {name:.40}")
    dtype, shape, start = place.get("dtype"), entries_of(place, "shape", int), place.get("offset")
    if not isinstance(dtype, str) or dtype not in TYPES or len(shape) > 3:
        raise CaptureError(
            f"the array {name:.40} is {shown(dtype)} of shape {shown(shape)}; expected {', '.join(TYPES)}"
        )
    sizes = [number_of(size, name="an axis", most=MOST_BYTES) for size in shape]
    first = number_of(start, name=f"the offset of {name:.40}", most=MOST_BYTES)
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


def _size(span: slice) -> int:
    """Return the length of a slice."""
    return int(span.stop - span.start)
