"""A model that is made in memory, as transformers spreads it over ranks: for what measures, without a folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from foreroute.adapters.checkpoint import without_progress_bars
from foreroute.adapters.hf.local_models import spread_over


def spread(whole: Any, device: torch.device, implementation: str = "foreroute") -> Any:
    """The model with its experts spread over all ranks, and FSDP2 over the same. A collective call.

    transformers spreads nothing over one rank. There the implementation is put on the experts of the model itself.

    Args:
        whole: on the CPU, the same on every rank; not to be used any more.
        device: of this rank, of the kind that transformers finds here.
        implementation: of expert parallelism.

    Raises:
        ConfigError: when transformers is older than its registry of expert parallelism.
    """
    config = replace(spread_over(dist.get_world_size()), ep_implementation=implementation)
    if config.ep_size > 1:
        weights, dtype = whole.state_dict(), whole.dtype
        with without_progress_bars():
            return type(whole).from_pretrained(
                None, config=whole.config, state_dict=weights, dtype=dtype, distributed_config=config
            )
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    mesh = init_device_mesh(device.type, (1,))
    dispatched = {rule: style for rule, style in whole.ep_plan.items() if style == "ep_dispatch_experts"}
    apply_expert_parallelism(whole.to(device), mesh, mesh, whole._expand_parallel_plan(dispatched), implementation)
    return whole
