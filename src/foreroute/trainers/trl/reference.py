"""When a policy with PEFT adapters stands for the reference model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import is_peft_model


def is_reference(policy: Any) -> Callable[[], bool]:
    """A question that can be put at any time: whether the policy's adapters are off, or others than now.

    TRL has no second model where PEFT is used: for the reference pass it disables the adapters, or, when an adapter is
    trained on, activates a copy of it named "ref".
    """
    if not is_peft_model(policy):
        return lambda: False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]
    trained = policy.active_adapter

    def now() -> bool:
        return policy.active_adapter != trained or any(layer.disable_adapters for layer in layers)

    return now
