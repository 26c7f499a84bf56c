"""Which rows of a trace are stored once: the shared prompts of a group. Not how a row is coded.

A sequence on disk is a chain of runs of stored rows. Samples of one prompt begin with the same tokens, routed alike by
the same weights; the later ones then point at the rows that the first one stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.trace.check import as_offsets, segment_rows
from foreroute.trace.container import RoutingTrace

MAX_EXPANSION = 64
"""A trace has at most so many times the rows that its file stores."""

MIN_SHARED = 16
PROBES = tuple(MIN_SHARED << 2 * i for i in range(10))
COMPARED_ROWS = 512


@dataclass(frozen=True)
class Runs:
    """How S sequences are chained from U stored rows.

    Attributes:
        offsets: int64 [S + 1], sequence s is the runs `offsets[s]:offsets[s + 1]`, joined.
        starts: int64 [Q], first stored row of each run.
        lengths: int64 [Q], rows of each run, at least 1.
    """

    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @property
    def rows_per_sequence(self) -> NDArray[np.int64]:
        """int64 [S]."""
        return np.diff(as_offsets(self.lengths)[self.offsets])

    def of(self, sequences: NDArray[np.int64]) -> Runs:
        """The runs of the given sequences, in that order."""
        counts = np.diff(self.offsets)[sequences]
        chosen = segment_rows(self.offsets[sequences], counts)
        return Runs(as_offsets(counts), self.starts[chosen], self.lengths[chosen])


def share_prefixes(trace: RoutingTrace) -> tuple[Runs, NDArray[np.int64], NDArray[np.int64]]:
    """Find routed prefixes that an earlier sequence has too: same tokens, weight versions and routes.

    Returns:
        runs: how each sequence is chained.
        rows_U: int64 [U], the row of `trace` that each stored row holds.
        stored_S: int64 [S], the rows that each sequence stores itself, the last ones of it.
    """
    seen: dict[tuple[int, int], int] = {}
    chains: list[list[tuple[int, int]]] = []
    stored_S = trace.lengths.copy()
    stored = total = 0
    for s in range(len(trace)):
        length = int(stored_S[s])
        keys = [(n, hash(trace.tokens(s)[:n].tobytes())) for n in PROBES if n <= length]
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
    runs = Runs(as_offsets(np.array([len(chain) for chain in chains], np.int64)), flat[:, 0].copy(), flat[:, 1].copy())
    return runs, segment_rows(trace.offsets[1:] - stored_S, stored_S), stored_S


def _common_rows(trace: RoutingTrace, a: int, b: int) -> int:
    length = int(min(trace.lengths[a], trace.lengths[b]))
    first_a, first_b = int(trace.offsets[a]), int(trace.offsets[b])
    for column in (trace.token_ids_N, trace.valid_N, trace.weight_versions_N):
        differs = column[first_a : first_a + length] != column[first_b : first_b + length]
        length = int(differs.argmax()) if differs.any() else length
    routed = trace.valid_N[first_a : first_a + length]
    length = length if routed.all() else int(routed.argmin())
    ids = trace.expert_ids_NLK
    for start in range(0, length, COMPARED_ROWS):
        stop = min(start + COMPARED_ROWS, length)
        differs = (ids[first_a + start : first_a + stop] != ids[first_b + start : first_b + stop]).any(axis=(1, 2))
        if differs.any():
            return start + int(differs.argmax())
    return length


def _first_rows(chain: list[tuple[int, int]], rows: int) -> list[tuple[int, int]]:
    head = []
    for start, length in chain:
        if rows <= 0:
            break
        head.append((start, min(length, rows)))
        rows -= length
    return head
