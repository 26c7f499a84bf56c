"""Models that transformers spreads over all ranks, with our implementation: how, and of those that are in no folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from foreroute.adapters.checkpoint import quiet_transformers
from foreroute.adapters.hf.loading import build_model, load_complete
from foreroute.errors import ConfigError


def spread_over(num_ranks: int) -> Any:
    """Return the `distributed_config` by which transformers spreads a model and its experts over all ranks."""
    from transformers import distributed

    if "ep_implementation" not in distributed.DistributedConfig.__dataclass_fields__:
        raise ConfigError(
            f"transformers {transformers.__version__} has no registry of expert parallelism; install 5.23 or newer"
        )
    return distributed.DistributedConfig(fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation="foreroute")


def build_spread(family: str, *, num_ranks: int, experts_implementation: str = "grouped_mm", **sizes: Any) -> Any:
    """Build a model as `build_model`, spread over all ranks, of which none ever has all of it. A collective call.

    Its weights, random numbers of each rank's own, are of no use but to look at it.
    """
    with torch.device("meta"):
        empty = build_model(family, seed=0, experts_implementation=experts_implementation, **sizes)
    zeros = {name: torch.zeros((), dtype=each.dtype).expand(each.shape) for name, each in empty.state_dict().items()}
    model = load_complete(
        type(empty),
        None,
        f"a new {family} model",
        config=empty.config,
        state_dict=zeros,
        dtype=torch.float32,
        experts_implementation=experts_implementation,
        distributed_config=spread_over(num_ranks),
    )
    generator = torch.Generator(model.device).manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.detach().to_local().normal_(std=0.02, generator=generator)
    return model


def spread(whole: Any, device: torch.device, implementation: str = "foreroute") -> Any:
    """Return the model with its experts spread over all ranks, and FSDP2 over the same. A collective call.

    The whole model, on the CPU and the same on every rank, is not to be used any more.
    """
    config = replace(spread_over(dist.get_world_size()), ep_implementation=implementation)
    if config.ep_size > 1:
        weights, dtype = whole.state_dict(), whole.dtype
        with quiet_transformers():
            return type(whole).from_pretrained(
                None, config=whole.config, state_dict=weights, dtype=dtype, distributed_config=config
            )
    # transformers spreads nothing over one rank: there the implementation is put on the experts of the model itself
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    mesh = init_device_mesh(device.type, (1,))
    dispatched = {rule: style for rule, style in whole.ep_plan.items() if style == "ep_dispatch_experts"}
    apply_expert_parallelism(whole.to(device), mesh, mesh, whole._expand_parallel_plan(dispatched), implementation)
    return whole
