"""PEFT's adapters of fused experts (`target_parameters`), as expert parallelism takes them.

PEFT wraps an experts module once for each parameter that it adapts, and puts W + s B A of all its experts in the place
of that parameter while a forward runs. Here the wrappers stay, so that adapters are switched, merged, saved and loaded
as ever, on the experts of this rank; what experts compute with, replicas too, is for the layer to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from foreroute.ep.adapters import ExpertAdapter
from foreroute.ep.shards import keep_experts
from foreroute.errors import AttachError


def require_adaptable(model: nn.Module, path: str, num_ranks: int) -> None:
    """Look at what wraps the experts module at a path, if something does.

    Raises:
        AttachError: when it is not LoRA of every expert on its own, or cannot be cut among this many ranks.
    """
    for wrapper in _wrappers(model, path):
        if type(wrapper).__name__ != "ParamWrapper" or not hasattr(wrapper, "_activate_lora"):
            raise AttachError(
                f"{path} is wrapped by a {type(wrapper).__name__}; over ranks experts can have the LoRA that PEFT 0.21 "
                "puts on target_parameters, merge others first"
            )
        where, experts = f"{path}.{wrapper.parameter_name}", wrapper.get_base_layer()
        if wrapper.merged:
            raise AttachError(f"adapters of {where} are merged into it; call unmerge_adapter() of the PEFT model first")
        if wrapper.get_param().dim() != 3:
            raise AttachError(
                f"{where} is adapted as one matrix, expected one for each of {experts.num_experts} experts; name "
                "gate_up_proj, up_proj or down_proj in target_parameters"
            )
        if _is_transposed(wrapper) and experts.num_experts == num_ranks:
            raise AttachError(
                f"{where} is adapted, and each rank would have one expert: PEFT takes its factors for those of a plain "
                "matrix, and would merge them transposed; use fewer ranks"
            )


def adapters_of(model: nn.Module, path: str) -> list[ExpertAdapter]:
    """The adapters of the experts module at a path."""
    found = []
    for wrapper in _wrappers(model, path):
        for name, factor_A in wrapper.lora_A.items():
            factors, scaling = (factor_A, wrapper.lora_B[name], int(wrapper.r[name])), partial(_scaling, wrapper, name)
            found.append(ExpertAdapter(wrapper.parameter_name, name, *factors, _is_transposed(wrapper), scaling))
    return found


def keep_adapters(model: nn.Module, path: str, experts: NDArray[np.integer]) -> None:
    """Leave some experts, integers in ascending order, to adapters."""
    for adapter in adapters_of(model, path):
        for _, factor, axis in adapter.factors:
            keep_experts(factor, experts, axis)


def draw_adapters(model: Any, paths: Iterable[str], rank: int) -> None:
    """Draw factors anew, by other numbers on each rank, where ranks have made those of their own experts alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1 + rank)
        for wrapper in [each for path in paths for each in _wrappers(model, path)]:
            for name, factor_A in wrapper.lora_A.items():
                factor_A.reset_parameters()
                wrapper.lora_B[name].reset_parameters()
                wrapper.reset_lora_parameters(name, model.peft_config[name].init_lora_weights)


def hand_over(model: nn.Module, path: str, num_experts: int) -> None:
    """Tell PEFT how many experts there are here, and that the layer does what PEFT would do in a forward."""
    for wrapper in _wrappers(model, path):
        wrapper.num_experts = num_experts
        wrapper._activate_lora = partial(_left_to_the_layer, wrapper, frozenset(wrapper.lora_A))


def _wrappers(model: nn.Module, path: str) -> Iterator[Any]:
    """Around the experts module, from the inside."""
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
        yield model.get_submodule(path)


def _is_transposed(wrapper: Any) -> bool:
    """Whether PEFT takes the parameter for [experts, in, out]; older releases take every one for that."""
    return not getattr(wrapper, "_did_swap_in_out_features", False)


def _scaling(wrapper: Any, name: str) -> float:
    is_off = wrapper.disable_adapters or wrapper.merged or name not in wrapper.active_adapters
    return 0.0 if is_off else float(wrapper.scaling[name])


def _left_to_the_layer(wrapper: Any, known: frozenset[str], active: list[str]) -> AbstractContextManager[None]:
    if strangers := [name for name in active if name in wrapper.lora_A and name not in known]:
        raise AttachError(
            f"adapter {strangers[0]} of {wrapper.parameter_name} was added after the experts were spread; add every "
            "adapter before hf.distribute"
        )
    return nullcontext()
