"""Finding the routers of a Hugging Face model, by what they are and not by which family they belong to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from foreroute.adapters.hf.plans import PLANS, REFUSED, TOP_K, Plan
from foreroute.errors import AttachError
from foreroute.trace import LayerKind, RoutedLayer

ROUTER_CLASS = re.compile(r"(Router|Gating|Gate)$")
NOT_A_ROUTER = re.compile(r"Density")
PERHAPS_A_ROUTER = re.compile(r"Gate$")
IN_PARENT = "route_tokens_to_experts"
"""The method of the block around a router that selects for it: in DBRX, and up to transformers 5.13 in DeepSeek's."""
ATTENTION = re.compile(r"attn|attention")


@dataclass(frozen=True)
class RouterSite:
    """One router of a model.

    Attributes:
        path: dotted name inside the model.
        module: the router.
        layer: its row of the layer axis.
        plan: how it selects.
        selecting: the module and the name of its method in which the selection is made.
    """

    path: str
    module: nn.Module
    layer: RoutedLayer
    plan: Plan
    selecting: tuple[nn.Module, str]

    @property
    def layer_path(self) -> str:
        """The dotted name of the numbered layer that the router is in."""
        parts = self.path.split(".")
        number = next(place for place, part in enumerate(parts) if part.isdigit())
        return ".".join(parts[: number + 1])

    @property
    def may_be_another_gate(self) -> bool:
        """Whether the class name alone does not say that this is a router: forget gates and the like."""
        return bool(PERHAPS_A_ROUTER.search(type(self.module).__name__))


def find_routers(model: nn.Module) -> list[RouterSite]:
    """Every module that may be a router, in the order of the modules.

    Raises:
        AttachError: when there is none, or one that is known not to be replayable, with the reason.
    """
    for path, module in model.named_modules():
        reason = REFUSED.get(type(module).__name__)
        if reason:
            raise AttachError(f"{path} ({type(module).__name__}) cannot be replayed: {reason}")
    sites = [
        _site(model, path, module)
        for path, module in model.named_modules()
        if ROUTER_CLASS.search(type(module).__name__) and not NOT_A_ROUTER.search(type(module).__name__)
    ]
    if not sites:
        raise AttachError(
            f"{type(model).__name__} has no router: no module's class name ends in Router, Gating or Gate. "
            "Attach to a Mixture-of-Experts model of transformers 5.14 or newer"
        )
    return sites


def _site(model: nn.Module, path: str, module: nn.Module) -> RouterSite:
    plan = PLANS.get(type(module).__name__, TOP_K)
    selecting = (module, "forward")
    parent = model.get_submodule(path.rpartition(".")[0])
    if hasattr(parent, IN_PARENT):
        selecting = (parent, IN_PARENT)
    return RouterSite(path, module, _layer(path, plan), plan, selecting)


def _layer(path: str, plan: Plan) -> RoutedLayer:
    """The decoder layer of a router; one in an attention block counts as a layer of its own."""
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    if not numbers:
        raise AttachError(f"router {path} is in no numbered layer; expected a path such as model.layers.3.mlp.gate")
    kind = LayerKind.ATTENTION if ATTENTION.search(path) else LayerKind.DECODER
    return RoutedLayer(numbers[0], LayerKind.HASH if plan.is_lookup else kind)
