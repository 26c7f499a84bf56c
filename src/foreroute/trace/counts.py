"""How many assignments each expert received."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.container import RoutingTrace


def count_assignments(trace: RoutingTrace, micro_step_S: ArrayLike) -> NDArray[np.int64]:
    """Assignments per micro-step, layer and expert.

    Args:
        trace: the routes of S sequences; absent rows do not count.
        micro_step_S: integers [S], the micro-step that each sequence belongs to, from 0.

    Returns:
        counts_MLE: int64 [M, L, E]. Its sum is K times L times the number of routed rows.
    """
    micro_steps = np.asarray(micro_step_S, dtype=np.int64)
    if micro_steps.shape != (len(trace),) or (micro_steps < 0).any():
        raise TraceContentError(
            f"got micro-steps of shape {micro_steps.shape} for {len(trace)} sequences; expected one number from 0 each"
        )
    spec = trace.spec
    num_steps = int(micro_steps.max()) + 1 if len(trace) else 0
    step_R = np.repeat(micro_steps, trace.lengths)[trace.valid_N]
    cell_RL = step_R[:, None] * spec.num_layers + np.arange(spec.num_layers)
    flat = cell_RL[..., None] * spec.num_experts + trace.expert_ids_NLK[trace.valid_N]
    counts = np.bincount(flat.reshape(-1), minlength=num_steps * spec.num_layers * spec.num_experts)
    return counts.reshape(num_steps, spec.num_layers, spec.num_experts)
