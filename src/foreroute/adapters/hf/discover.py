"""Finding the routers of a Hugging Face model, by what they are and not by which family they belong to."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from torch import nn

from foreroute.errors import AttachError
from foreroute.trace import RoutedLayer

ROUTER_CLASS = re.compile(r"(Router|TopKGating|Gate)$")
NOT_A_ROUTER = re.compile(r"Density")


@dataclass(frozen=True)
class RouterSite:
    """One router of a model.

    Attributes:
        path: dotted name inside the model.
        module: the router.
        layer: its row of the layer axis.
    """

    path: str
    module: nn.Module
    layer: RoutedLayer


def find_routers(model: nn.Module) -> list[RouterSite]:
    """Every router of the model, in the order in which its layers run.

    Raises:
        AttachError: when there is none, or when two share a decoder layer.
    """
    sites = [
        RouterSite(path, module, RoutedLayer(_layer_number(path)))
        for path, module in model.named_modules()
        if ROUTER_CLASS.search(type(module).__name__) and not NOT_A_ROUTER.search(type(module).__name__)
    ]
    if not sites:
        raise AttachError(
            f"{type(model).__name__} has no router: no module's class name ends in Router, TopKGating or Gate. "
            "Attach to a Mixture-of-Experts model of transformers 5.14 or newer"
        )
    layers = [site.layer for site in sites]
    if len(set(layers)) != len(layers):
        twice = next(site.path for site in sites if layers.count(site.layer) > 1)
        raise AttachError(
            f"{type(model).__name__} has more than one router in one decoder layer ({twice}); this is not supported"
        )
    return sites


def find_trunk(model: nn.Module, sites: list[RouterSite]) -> nn.Module:
    """The innermost module that takes `input_ids` and contains every router: its forward is one pass over a batch."""
    first, *rest = (site.path.split(".") for site in sites)
    shared = len(first) - 1
    for path in rest:
        shared = min(shared, next(i for i, (a, b) in enumerate(zip(first, path, strict=False)) if a != b))
    for depth in range(shared, -1, -1):
        module = model.get_submodule(".".join(first[:depth]))
        if "input_ids" in inspect.signature(module.forward).parameters:
            return module
    raise AttachError(
        f"no module of {type(model).__name__} that contains its routers takes input_ids; "
        "replay needs the tokens to check that routes and batch belong together"
    )


def _layer_number(path: str) -> int:
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    if not numbers:
        raise AttachError(f"router {path} is in no numbered layer; expected a path such as model.layers.3.mlp.gate")
    return numbers[0]
