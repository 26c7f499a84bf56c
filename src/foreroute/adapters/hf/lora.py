"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: put into a model, and merged for engines that know none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foreroute.errors import ConfigError

ADAPTER = "default"
INSIDE, BASE = ".lora_", ".base_layer."
"""In names of weights: those of adapters, and those of the layers that they were put around."""


def add_lora(model: nn.Module, *, rank: int, alpha: float, targets: Sequence[str], seed: int) -> None:
    """Put adapters around linear layers, and freeze everything else. They change nothing until they are trained.

    Args:
        model: changed in place.
        rank: r of W + alpha / r · B A.
        alpha: the scale in the same formula.
        targets: names of the layers, such as "q_proj", in every block.
        seed: of A; B is zero. The global random state is left alone.

    Raises:
        ConfigError: without peft, or when a name is of no layer, or of one that cannot be adapted.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError("model.lora needs peft, which is not installed: pip install peft") from error
    # peft itself is content with one name that fits
    paths = [f".{path}" for path, _ in model.named_modules()]
    if unknown := [target for target in targets if not any(path.endswith(f".{target}") for path in paths)]:
        raise _refusal(model, targets, f"there is no {', '.join(unknown)}")
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(targets))
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model)
    except ValueError as error:
        raise _refusal(model, targets, str(error)) from error


def merged(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model with adapters under the names of one without, with alpha / r · B A added.

    Args:
        weights: the state of the model.
        model: has the adapters.
    """
    layers: dict[str, Any] = {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}
    plain = without_lora(weights)
    with torch.no_grad():
        for path, layer in layers.items():
            name = f"{path}.weight"
            plain[name] = plain[name] + layer.get_delta_weight(ADAPTER).to(plain[name].dtype)
    return plain


def without_lora(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that adapters were put around, under the names that they had before."""
    return {name.replace(BASE, "."): weight for name, weight in weights.items() if INSIDE not in name}


def _refusal(model: nn.Module, targets: Sequence[str], why: str) -> ConfigError:
    linear = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    return ConfigError(
        f"model.lora.targets = {list(targets)} cannot be adapted ({why}); linear layers of this model are "
        f"{', '.join(sorted(linear))}"
    )
