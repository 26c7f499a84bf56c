"""A trace to the metadata and tensors of its file. `trace.reading` is the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.blocks import cut_blocks
from foreroute.trace.check import as_tokens, as_versions, check_rows
from foreroute.trace.codec import CODECS, Codec, CodecName, encoder
from foreroute.trace.container import NO_VERSION, RoutingTrace
from foreroute.trace.index import TraceIndex, check_expansion, check_facts, write_index
from foreroute.trace.seal import SEAL_BYTES, seal_payloads, seal_rows
from foreroute.trace.sharing import share_prefixes


def encode_trace(trace: RoutingTrace, name: CodecName) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of the file of a trace.

    Raises:
        TraceContentError: when a row, a token, a weight version or a fact cannot be true, the codec is unknown, there
            are gate weights, or hardly any of very many rows is routed.
    """
    if name not in CODECS:
        raise TraceContentError(f"codec {name!r} is unknown; expected one of {', '.join(CODECS)}")
    if trace.gate_weights_NLK is not None:
        raise TraceContentError(
            "the file format has no place for gate weights; save trace.without_gate_weights(), the routes alone"
        )
    ids = np.ascontiguousarray(trace.expert_ids_NLK)
    check_facts(trace.spec, trace.provenance)
    _refuse_bad_rows(trace)
    _refuse_bad_cells(trace, ids)
    runs, rows_U, stored_S = share_prefixes(trace)
    starts = cut_blocks(stored_S, trace.spec)
    bounds = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    tokens, valid, versions = trace.token_ids_N[rows_U], trace.valid_N[rows_U], trace.weight_versions_N[rows_U]
    blocks = [rows_U[a:b][valid[a:b]] for a, b in bounds]
    codec = encoder(name, trace.spec, ids, blocks)
    payloads, words_BL, seals = _encode_blocks(codec, ids, blocks)
    spans = np.flatnonzero(np.r_[True, versions[1:] != versions[:-1]][: len(versions)])
    index = TraceIndex(
        spec=trace.spec,
        codec_name=name,
        codec=codec,
        pick_order_kept=trace.pick_order_kept and codec.keeps_order,
        provenance=trace.provenance,
        runs=runs,
        block_starts=starts,
        span_starts=spans,
        span_versions=versions[spans],
        payload_words=words_BL,
        payload_seals=seals,
        row_seals=_as_seals([seal_rows(tokens[a:b], valid[a:b]) for a, b in bounds], len(bounds)),
    )
    check_expansion(index, tokens.nbytes + payloads.nbytes)
    metadata, tensors = write_index(index)
    bits = np.packbits(valid, bitorder="little")
    return metadata, {**tensors, "token_ids": tokens, "valid_bits": bits, "payloads": payloads}


def _encode_blocks(
    codec: Codec, ids: NDArray[Any], blocks: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint8]]:
    """All payloads, the words of each [B, L], and the seal of each [B, L, 16]."""
    words_BL = np.zeros((len(blocks), ids.shape[1]), np.uint32)
    payloads, seals = [np.zeros(0, np.uint64)], []
    for b, rows in enumerate(blocks):
        words, sizes = codec.encode(ids, rows) if len(rows) else (payloads[0], np.zeros(ids.shape[1], np.int64))
        words_BL[b] = sizes
        seals.append(seal_payloads(words, np.cumsum(sizes) - sizes, sizes))
        payloads.append(words)
    return np.concatenate(payloads), words_BL, _as_seals(seals, *words_BL.shape)


def _refuse_bad_rows(trace: RoutingTrace) -> None:
    """What a reader refuses is not written: a constructed trace was never checked."""
    as_tokens(trace.token_ids_N, name="token_ids_N")
    as_versions(trace.weight_versions_N, name="weight_versions_N")
    if (trace.weight_versions_N[~trace.valid_N] != NO_VERSION).any():
        raise TraceContentError("a row without routes states a weight version; expected NO_VERSION")


def _refuse_bad_cells(trace: RoutingTrace, ids: NDArray[Any]) -> None:
    from foreroute.trace.codec.bits import first_bad_cell

    spec = trace.spec
    routed = np.flatnonzero(trace.valid_N)
    if first_bad_cell(ids.reshape(-1), spec.num_layers, spec.top_k, routed, spec.num_experts) >= 0:
        check_rows(ids, trace.valid_N, trace.offsets, spec)


def _as_seals(parts: list[bytes], *shape: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(*shape, SEAL_BYTES)
