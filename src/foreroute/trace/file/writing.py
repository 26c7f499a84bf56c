"""A trace to a file: shared prompts found, rows cut into blocks, routes coded, all sealed and written at once."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError, TraceFileError
from foreroute.files import is_text, seal_arrays, seal_file, write_atomically, writing_named
from foreroute.trace.checks import as_offsets, as_tokens, as_versions, check_memory, check_rows, join_ranges
from foreroute.trace.container import NO_VERSION, RoutingTrace
from foreroute.trace.file.codec import CODEC_CLASSES, CODECS, CodecName
from foreroute.trace.file.format import (
    FORMAT_VERSION,
    MAX_EXPANSION,
    MOST_HEADER_BYTES,
    ORDER,
    SEAL_BYTES,
    StoredRuns,
    is_bulk,
)
from foreroute.trace.file.streams import encode_streams, row_bytes, sealed, stored_streams
from foreroute.trace.spec import RoutingSpec
from foreroute.trace.streams import common_rows

ROWS_PER_EXPERT = 16
LEAST_ROWS, MOST_ROWS = 1024, 8192
"""Rows that a block aims at. With fewer, the ranking of experts that `planes` writes once per block is dear; with more,
it fits each part of the block worse, and a reader of few sequences decodes more that it does not need."""

MIN_SHARED = 16
"""Rows of a shared prefix that are worth a run of their own, which takes 16 bytes and cuts the sequence in two."""
PROBES = tuple(MIN_SHARED << 2 * i for i in range(10))
"""Lengths of prefixes that are looked up, each four times the one before: 16, 64, ... 4 Mi rows."""
COMPARED_ROWS = 512
"""Rows whose routes are compared at once: most prefixes end early, and a whole sequence of them is large."""


def save(
    trace: RoutingTrace, path: str | os.PathLike[str], *, codec: CodecName = "packed", overwrite: bool = False
) -> Path:
    """Write `trace` to `path`: the whole file or nothing. Prompts that samples share are stored once.

    Args:
        trace: what to write.
        path: where to.
        codec: "packed" keeps pick order in ceil(log2 E) bits per pick; "raw" in whole bytes; "planes" drops the order
            (ids come back ascending) and is the densest.
        overwrite: whether an existing file may be replaced.

    Raises:
        TraceFileError: when `path` exists and `overwrite` is False, or cannot be written: what was there is whole.
        TraceContentError: when a row cannot be true, the codec is unknown, or the model's name and the provenance take
            more than 1 MiB.
    """
    from safetensors.numpy import save as to_bytes

    target = Path(path)
    with writing_named(target, TraceFileError):
        if target.exists() and not overwrite:
            raise TraceFileError(f"{target} already exists; pass another path, or overwrite=True to replace it")
        metadata, tensors = encode_trace(trace, codec)
        raw = to_bytes(tensors, metadata=metadata)
        if (header := int.from_bytes(raw[:8], "little")) > MOST_HEADER_BYTES:
            raise TraceContentError(
                f"the header would take {header} bytes, expected {MOST_HEADER_BYTES} at most; shorten the provenance"
            )
        # Written here and not by safetensors, whose own temporary file hides the modes and names of ours.
        write_atomically(target, raw, overwrite=overwrite)
    return target


def encoded_size(trace: RoutingTrace, codec: CodecName) -> int:
    """Return the bytes that a file of `trace` would hold in a codec, its header left out."""
    _, tensors = encode_trace(trace, codec)
    return sum(tensor.nbytes for tensor in tensors.values())


def encode_trace(trace: RoutingTrace, name: CodecName) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Make the metadata and tensors of the file of a trace.

    Raises:
        TraceContentError: when a row, a token, a weight version or a fact cannot be true, the codec is unknown, or
            hardly any of very many rows is routed.
    """
    if name not in CODECS:
        raise TraceContentError(f"codec {name!r} is unknown; expected one of {', '.join(CODECS)}")
    spec, ids_NLK = trace.spec, np.ascontiguousarray(trace.expert_ids_NLK)
    _refuse_what_no_reader_takes(trace, ids_NLK)
    runs, rows_U, stored_S = share_prefixes(trace)
    starts = cut_blocks(stored_S, spec)
    tokens, valid, versions = trace.token_ids_N[rows_U], trace.valid_N[rows_U], trace.weight_versions_N[rows_U]
    spans = np.flatnonzero(np.r_[True, versions[1:] != versions[:-1]][: len(versions)])

    bounds = list(pairwise(starts.tolist()))
    blocks = [rows_U[a:b][valid[a:b]] for a, b in bounds]
    codec = CODEC_CLASSES[name].fitted(spec, ids_NLK, blocks)
    words_BL = np.zeros((len(blocks), spec.num_layers), np.uint32)
    coded = []
    for block, rows in enumerate(blocks):
        if len(rows):  # a block without routed rows has payloads of no words
            words, words_BL[block] = codec.encode(ids_NLK, rows)
            coded.append(words)
    if trace.gate_weights_NLK is not None and not codec.keeps_order:
        trace = trace.without_pick_order()  # weights lie in the order of the picks
    streams, beside = encode_streams(trace, [rows_U[a:b] for a, b in bounds])
    tensors: dict[str, NDArray[Any]] = {**sealed(coded, words_BL), **beside, "token_ids": tokens}
    stored_bytes = sum(tensor.nbytes for tensor_name, tensor in tensors.items() if is_bulk(tensor_name))
    for decoded in (
        int(runs.edges[-1]) * row_bytes(spec, stored_streams(streams)),
        *(stream.ids.nbytes for stream in trace.streams.values()),
    ):
        check_memory(decoded, stored_bytes)

    layers = [[int(layer.index), layer.kind.value] for layer in spec.layers]
    row_seals = b"".join([seal_arrays(tokens[a:b], valid[a:b]) for a, b in bounds])
    tensors |= {
        "run_offsets": runs.offsets,
        "run_starts": runs.starts,
        "run_lengths": runs.lengths,
        "block_starts": starts,
        "span_starts": spans,
        "span_versions": versions[spans],
        "row_seals": np.frombuffer(row_seals, np.uint8).reshape(len(bounds), SEAL_BYTES),
        "valid_bits": np.packbits(valid, bitorder="little"),
        **codec.tables,
    }
    facts = {"num_experts": int(spec.num_experts), "top_k": int(spec.top_k), "layers": layers, "model": spec.model}
    metadata = {
        "foreroute.version": str(FORMAT_VERSION),
        "foreroute.spec": json.dumps(facts),
        "foreroute.codec": name,
        "foreroute.pick_order": ORDER[trace.pick_order_kept and codec.keeps_order],
        "foreroute.streams": streams,
        "foreroute.provenance": json.dumps(dict(trace.provenance)),
    }
    small = {name: tensor for name, tensor in tensors.items() if not is_bulk(name)}
    metadata["foreroute.digest"] = seal_file(metadata, small)
    return metadata, tensors


def _refuse_what_no_reader_takes(trace: RoutingTrace, ids_NLK: NDArray[Any]) -> None:
    """Refuse what a reader would refuse: a constructed trace was never checked."""
    from foreroute.trace.kernels import first_bad_picks

    spec = trace.spec
    if not is_text(spec.model):
        raise TraceContentError(f"the model's name is {spec.model!r:.80}; expected text")
    for key, value in trace.provenance.items():
        if not (is_text(key) and is_text(value)):
            raise TraceContentError(f"provenance has {key!r:.40} = {value!r:.80}; expected texts")
    as_tokens(trace.token_ids_N, name="token_ids_N")
    as_versions(trace.weight_versions_N, name="weight_versions_N")
    if (trace.weight_versions_N[~trace.valid_N] != NO_VERSION).any():
        raise TraceContentError("a row without routes states a weight version; expected NO_VERSION")
    routed = np.flatnonzero(trace.valid_N)
    if first_bad_picks(ids_NLK.reshape(-1), spec.num_layers, spec.top_k, routed, spec.num_experts) >= 0:
        check_rows(ids_NLK, trace.valid_N, trace.offsets, spec)  # names the row


def share_prefixes(trace: RoutingTrace) -> tuple[StoredRuns, NDArray[np.int64], NDArray[np.int64]]:
    """Find routed prefixes that an earlier sequence has too: same tokens, weight versions and decisions.

    Returns:
        runs: how each sequence is chained.
        rows_U: int64 [U], the row of `trace` that each stored row holds.
        stored_S: int64 [S], the rows that each sequence stores itself, the last ones of it.
    """
    offsets = trace.offsets
    stored_S = offsets[1:] - offsets[:-1]
    seen: dict[tuple[int, int], int] = {}  # the last sequence with a beginning of that length and hash
    chains: list[list[tuple[int, int]]] = []
    stored = total = 0
    # Before sequence s, its predecessors have `total` rows, which `chains` finds among the `stored` ones.
    for s in range(len(stored_S)):
        length = int(stored_S[s])
        tokens = trace.token_ids_N[offsets[s] : offsets[s + 1]]
        keys = [(n, hash(tokens[:n].tobytes())) for n in PROBES if n <= length]
        # The longest beginning that was seen: a hash only proposes, the rows themselves are compared.
        model = next((seen[key] for key in reversed(keys) if key in seen), None)
        shared = 0 if model is None else _common_rows(trace, model, s)
        if shared < MIN_SHARED or total + length > MAX_EXPANSION * (stored + length - shared):
            shared = 0
        chain = [] if model is None else _first_rows(chains[model], shared)
        chains.append([*chain, (stored, length - shared)] if shared < length else chain)
        seen.update(dict.fromkeys(keys, s))
        stored_S[s] -= shared
        stored += length - shared
        total += length
    flat = np.array([run for chain in chains for run in chain], np.int64).reshape(-1, 2)
    runs_S = np.array([len(chain) for chain in chains], np.int64)
    runs = StoredRuns(as_offsets(runs_S), flat[:, 0].copy(), flat[:, 1].copy(), as_offsets(flat[:, 1]))
    return runs, join_ranges(offsets[1:] - stored_S, stored_S), stored_S


def _common_rows(trace: RoutingTrace, a: int, b: int) -> int:
    """Count the rows that two sequences have in common from their beginnings on, all of them routed."""
    first_a, first_b = int(trace.offsets[a]), int(trace.offsets[b])
    length = min(int(trace.offsets[a + 1]) - first_a, int(trace.offsets[b + 1]) - first_b)
    for column in (trace.token_ids_N, trace.valid_N, trace.weight_versions_N):
        differs = column[first_a : first_a + length] != column[first_b : first_b + length]
        length = int(differs.argmax()) if differs.any() else length
    routed = trace.valid_N[first_a : first_a + length]
    length = length if routed.all() else int(routed.argmin())
    for stream in trace.streams.values():
        length = common_rows(stream, first_a, first_b, length)
    picked = [trace.expert_ids_NLK, *([] if trace.gate_weights_NLK is None else [trace.gate_weights_NLK])]
    for start in range(0, length, COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, length)
        here, there = (slice(first + start, first + stop) for first in (first_a, first_b))
        differs = np.logical_or.reduce([(each[here] != each[there]).any(axis=(1, 2)) for each in picked])
        if differs.any():
            return start + int(differs.argmax())
    return length


def _first_rows(chain: list[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    """Return the runs of so many rows from the beginning of a chain."""
    head = []
    for start, length in chain:
        if rows <= 0:
            break
        head.append((start, min(length, rows)))
        rows -= length
    return head


def cut_blocks(stored_S: NDArray[np.int64], spec: RoutingSpec) -> NDArray[np.int64]:
    """Return the first stored row of each block, and the number of stored rows at the end: int64 [B + 1].

    Blocks begin with a sequence, so that whole sequences are read alone. A block aims at 16 rows per expert, from 1,024
    to 8,192, and takes sequences until it has three quarters of that. A sequence of more than twice as much has blocks
    of its own, about even ones.

    Args:
        stored_S: int64 [S], the rows that each sequence stores.
        spec: the model.
    """
    aim = min(max(ROWS_PER_EXPERT * spec.num_experts, LEAST_ROWS), MOST_ROWS)
    cuts, filled, end = [0], 0, 0
    # Before each sequence: `end` rows are dealt with, the last `filled` of them in the block that begins at cuts[-1].
    for rows in stored_S.tolist():
        if filled and filled + rows > 2 * aim:
            cuts.append(end)
            filled = 0
        pieces = max(1, round(rows / aim)) if rows > 2 * aim else 1
        # the larger pieces first, one row longer than the others
        cuts.extend(end + piece * (rows // pieces) + min(piece, rows % pieces) for piece in range(1, pieces))
        end += rows
        filled = filled + rows if pieces == 1 else aim
        if 4 * filled >= 3 * aim:
            cuts.append(end)
            filled = 0
    return np.array(cuts if cuts[-1] == end else [*cuts, end], np.int64)
