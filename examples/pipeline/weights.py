"""Weights of Qwen3-MoE between Megatron-Core and the layout of Hugging Face, streamed tensor by tensor.

Megatron stacks what Hugging Face keeps apart: queries, keys and values by group of heads, gate and up projection. One
description of each stack serves both ways. Experts are taken from the rank where they live now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from torch import Tensor, nn

from foreroute.adapters.megatron import RoutedMegatron
from foreroute.errors import ConfigError

WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
WHOLE_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
FEED_FORWARD = re.compile(r"mlp\.(?:experts\.local_experts\.(?P<expert>\d+)\.)?linear_(?P<which>fc[12])\.weight")


def load(model: nn.Module, routed: RoutedMegatron, folder: Path, config: Mapping[str, Any]) -> None:
    """Fill this rank's weights from a checkpoint, of which it reads no others.

    Args:
        model: GPTModel of the local layer spec; a pipeline stage of it.
        routed: the same, attached.
        folder: with safetensors in the layout of Hugging Face.
        config: its `config.json`.

    Raises:
        ConfigError: when a weight is missing.
    """
    with ExitStack() as stack, torch.no_grad():
        files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            files.update(dict.fromkeys(file.keys(), file))
        for name, parameter in _named_weights(model, routed):
            stacked = Stacked.of(name, config)
            if missing := set(stacked.names) - files.keys():
                raise ConfigError(f"{folder} lacks the weight {min(missing)!r}, which {name} is made of")
            parts = [files[part].get_tensor(part) for part in stacked.names]
            axis = _shared_axis(name, parameter)
            if axis is not None:
                rank, ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
                parts = [part.chunk(ranks, axis)[rank] for part in parts]
            parameter.copy_(stacked.join(parts).view_as(parameter))


def exported(model: nn.Module, routed: RoutedMegatron, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """All weights of the model in the names of Hugging Face, on the first rank; nothing on the others, which send.

    A collective call on every rank, to be iterated to its end on each. The first rank holds one tensor of another rank
    at a time. Experts that moved are sent by the rank where they live, replicas by none.

    Args:
        model: as for `load`; weights keep the dtype of its parameters.
        routed: as for `load`.
        config: as for `load`.

    Raises:
        ConfigError: under expert tensor parallelism, and for a weight that Qwen3-MoE does not have.
    """
    if mpu.get_expert_tensor_parallel_world_size() > 1:
        raise ConfigError("experts are exported whole; run with expert_tensor_parallel_size=1")
    own = _own_parts(model, routed, config)
    if dist.get_rank():
        parts = list(own)
        dist.send_object_list([[(name, part.shape, part.dtype) for name, part in parts]], 0)
        for _, part in parts:
            dist.send(part.contiguous(), 0)
        return
    yield from own
    device = next(model.parameters()).device
    for source in range(1, dist.get_world_size()):
        announced: list[Any] = [None]
        dist.recv_object_list(announced, source)
        for name, shape, dtype in announced[0]:
            part = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(part, source)
            yield name, part


@dataclass(frozen=True)
class Stacked:
    """Weights of Hugging Face that one weight of Megatron stacks along its rows, group after group.

    Attributes:
        names: of the parts, in the order in which they lie in a group.
        shares: of the rows of a group that each part has.
        groups: how many there are on a tensor-parallel rank.
    """

    names: tuple[str, ...]
    shares: tuple[int, ...] = (1,)
    groups: int = 1

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> Stacked:
        """The parts of a weight of Megatron, whose layers and experts are numbered as those of the whole model."""
        if name in WHOLE:
            return cls((WHOLE[name],))
        if in_layer := IN_LAYER.fullmatch(name):
            prefix, inner = f"model.layers.{in_layer[1]}.", in_layer[2]
            if inner in WHOLE_IN_LAYER:
                return cls((prefix + WHOLE_IN_LAYER[inner],))
            if inner == "self_attention.linear_qkv.weight":
                groups = config["num_key_value_heads"]
                names = tuple(f"{prefix}self_attn.{part}_proj.weight" for part in "qkv")
                shares = (config["num_attention_heads"] // groups, 1, 1)
                return cls(names, shares, groups // mpu.get_tensor_model_parallel_world_size())
            if found := FEED_FORWARD.fullmatch(inner):
                prefix += "mlp." if found["expert"] is None else f"mlp.experts.{found['expert']}."
                if found["which"] == "fc1":
                    return cls((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), (1, 1))
                return cls((f"{prefix}down_proj.weight",))
        raise ConfigError(f"Qwen3-MoE has no weight {name}; this example converts the local layer spec of Megatron")

    def split(self, weight: Tensor) -> list[Tensor]:
        """The parts of Megatron's weight."""
        grouped = weight.unflatten(0, (self.groups, -1))
        rows = grouped.shape[1] // sum(self.shares)
        return [part.flatten(0, 1) for part in grouped.split([rows * share for share in self.shares], dim=1)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Megatron's weight."""
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _own_parts(model: nn.Module, routed: RoutedMegatron, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """What this rank exports: of ranks that hold the same weights, or share one, the first does."""
    is_first = not mpu.get_tensor_model_parallel_rank()
    for name, parameter in _named_weights(model, routed):
        is_expert = ".local_experts." in name
        if mpu.get_expert_data_parallel_rank() if is_expert else mpu.get_data_parallel_rank():
            continue
        stacked, axis = Stacked.of(name, config), _shared_axis(name, parameter)
        parts = stacked.split(parameter.detach())
        if axis is not None:
            parts = [_gathered(part, axis) for part in parts]
        if is_expert or is_first:
            yield from zip(stacked.names, parts, strict=True)


def _shared_axis(name: str, parameter: nn.Parameter) -> int | None:
    """The axis that tensor-parallel ranks share a weight along; None for one that each holds whole, as experts are."""
    if ".local_experts." in name or mpu.get_tensor_model_parallel_world_size() == 1:
        return None
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _gathered(part: Tensor, axis: int) -> Tensor:
    group = mpu.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, axis)


def _named_weights(model: nn.Module, routed: RoutedMegatron) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's weights, their layers and experts numbered as those of the whole model."""
    row_of = {layer.index: row for row, layer in enumerate(routed.spec.layers)}
    rank = mpu.get_expert_model_parallel_rank()
    for name, parameter in model.named_parameters():
        if in_layer := IN_LAYER.fullmatch(name):
            layer = model.get_submodule(f"decoder.layers.{in_layer[1]}").layer_number - 1
            inner = in_layer[2]
            if ".local_experts." in inner:
                # the experts of a rank are in its slots in ascending order
                here = np.flatnonzero(routed.home_LE[row_of[layer]] == rank)
                before, slot, after = re.split(r"(?<=local_experts\.)(\d+)", inner)
                inner = f"{before}{here[int(slot)]}{after}"
            name = f"decoder.layers.{layer}.{inner}"
        yield name, parameter
