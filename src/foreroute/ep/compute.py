"""What experts compute, on rows that are already in order of their group.

The layouts are those of experts modules in transformers 5, told by their attributes: `has_gate`, `has_bias`,
`is_transposed` and the method `_apply_gate`, which also knows whether gate and up are concatenated or interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foreroute.errors import AttachError

LEAST_TORCH = "2.10"
"""The first with torch.nn.functional.grouped_mm; what pyproject.toml asks for."""

LEAST_ROWS = {("cpu", torch.float32): 4}
"""Below this many rows, BLAS computes a row with another order of sums than in a larger GEMM."""

WHOLE_VECTORS = 64
"""So many rows of any width fill whole SIMD registers. The CPU computes what is left one by one, with another exp."""


def run_experts(module: Any, weights: Mapping[str, Tensor], rows_RD: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    """Up, gate and down projection of every group with its own weights.

    Args:
        module: the experts module, for its layout, gate and activation.
        weights: name -> [S, ...], as the module's own parameters are laid out, one row per group.
        rows_RD: [R, D], in order of group.
        group_rows_S: rows of each group.

    Returns:
        [R, D'].
    """
    up = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _grouped_linear(module, weights, up, rows_RD, group_rows_S)
    hidden = _rowwise(module._apply_gate if module.has_gate else module.act_fn, hidden)
    return _grouped_linear(module, weights, "down_proj", hidden, group_rows_S)


def require_grouped_mm() -> None:
    """Raise `AttachError` for a torch that cannot multiply the rows of every expert by its own matrix."""
    if not hasattr(functional, "grouped_mm"):
        raise AttachError(
            f"torch {torch.__version__} has no torch.nn.functional.grouped_mm, which experts on several ranks are "
            f"computed with; install torch {LEAST_TORCH} or newer"
        )


def least_rows(weights: Mapping[str, Tensor]) -> int:
    """How many rows a group must have for the bits of a row not to depend on how many there are."""
    weight = weights["down_proj"]
    return LEAST_ROWS.get((weight.device.type, weight.dtype), 1)


def _rowwise(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function of each row so that the bits of a row do not depend on which others there are."""
    if rows.device.type != "cpu":
        return function(rows)
    return function(functional.pad(rows, (0, 0, 0, -len(rows) % WHOLE_VECTORS)))[: len(rows)]


def _grouped_linear(
    module: Any, weights: Mapping[str, Tensor], name: str, rows: Tensor, group_rows_S: Sequence[int]
) -> Tensor:
    weight = weights[name] if module.is_transposed else weights[name].transpose(-2, -1)
    out = _grouped_mm(rows.to(weight.dtype), weight, group_rows_S)
    if not module.has_bias:
        return out
    sizes = torch.tensor(group_rows_S).to(rows.device, non_blocking=True)
    return out + weights[f"{name}_bias"].repeat_interleave(sizes, dim=0, output_size=len(rows))


def _grouped_mm(rows: Tensor, weight: Tensor, group_rows_S: Sequence[int]) -> Tensor:
    if rows.dtype == torch.float64:  # which grouped_mm lacks
        parts = zip(rows.split(list(group_rows_S)), weight.unbind(0), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])
    ends = torch.tensor(group_rows_S).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
    return functional.grouped_mm(rows, weight, offs=ends)
