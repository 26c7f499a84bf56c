"""Checksums that travel with the rows of experts, for debug mode: XXH3, 64 bit, as signed integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash
from torch import Tensor

CHECKSUMS = "checksums"
"""Beside the names of the weights; a name that no module gives to a tensor [experts, ...]."""


def row_checksums(rows: Mapping[str, Tensor], row: int) -> list[int]:
    """Of row `row` of every tensor, in order of their names."""
    return [_checksum(rows[name].detach()[row]) for name in sorted(rows)]


def with_checksums(rows: Mapping[str, Tensor], chosen: Iterable[int]) -> dict[str, Tensor]:
    """The tensors, and beside them int64 [rows, names], the checksums of the chosen rows, 0 elsewhere."""
    some = next(iter(rows.values()))
    sums = torch.zeros((len(some), len(rows)), dtype=torch.int64)
    for row in set(chosen):
        sums[row] = torch.tensor(row_checksums(rows, row))
    return {**rows, CHECKSUMS: sums.to(some.device)}


def damaged(rows: Mapping[str, Tensor], sums: Tensor, chosen: Iterable[int]) -> list[int]:
    """Which of the chosen rows do not have the checksums int64 [rows, names] that came with them."""
    return [row for row in chosen if row_checksums(rows, row) != sums[row].tolist()]


def _checksum(row: Tensor) -> int:
    # bytes, for numpy has no bfloat16
    content = row.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    digest = xxhash.xxh3_64_intdigest(content)
    return digest - 2**64 if digest >= 2**63 else digest
