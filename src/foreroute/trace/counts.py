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
    micro_steps = np.asarray(micro_step_S)
    if micro_steps.shape != (len(trace),) or (micro_steps.size and micro_steps.dtype.kind not in "iu"):
        raise TraceContentError(
            f"got micro-steps of dtype {micro_steps.dtype} and shape {micro_steps.shape} for {len(trace)} sequences; "
            "expected one integer from 0 each"
        )
    if micro_steps.size and micro_steps.min() < 0:
        raise TraceContentError(f"micro-step {int(micro_steps.min())} is below 0; leave out sequences by trace.select")
    micro_steps = micro_steps.astype(np.int64)
    spec = trace.spec
    num_steps = int(micro_steps.max()) + 1 if len(trace) else 0
    step_R = np.repeat(micro_steps, trace.lengths)[trace.valid_N]
    cell_RL = step_R[:, None] * spec.num_layers + np.arange(spec.num_layers)
    flat = cell_RL[..., None] * spec.num_experts + trace.expert_ids_NLK[trace.valid_N]
    counts = np.bincount(flat.reshape(-1), minlength=num_steps * spec.num_layers * spec.num_experts)
    return counts.reshape(num_steps, spec.num_layers, spec.num_experts)
