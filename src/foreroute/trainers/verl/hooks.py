"""What this adapter stands on in verl, checked against the release at hand."""

from __future__ import annotations

import inspect
from typing import Any

import verl

from foreroute.adapters.versions import PEERS
from foreroute.errors import AttachError

HOOKS = {
    # method of FSDPEngineWithLMHead: parameters that are passed to it, or read from it, by name or place
    "initialize": (),
    "forward_backward_batch": ("data", "loss_function", "forward_only"),
    "forward_step": ("micro_batch", "loss_function", "forward_only"),
    "disable_adapter": (),
    "eval_mode": (),
    "get_data_parallel_group": (),
    "_get_packed_pad_size": ("packed_length",),
}
CONFIG = ("router_replay", "forward_only", "strategy", "ulysses_sequence_parallel_size")


def require_hooks(engine: type, config: type) -> None:
    """Raise `AttachError` unless an engine has the methods that are overridden, and its configuration the keys.

    Args:
        engine: verl's `FSDPEngineWithLMHead`.
        config: verl's `FSDPEngineConfig`.
    """
    lacks = [what for name, wanted in HOOKS.items() if (what := _lacking(engine, name, wanted))]
    fields: Any = getattr(config, "__dataclass_fields__", {})
    lacks += [f"{config.__name__} without {name}" for name in CONFIG if name not in fields]
    if lacks:
        raise AttachError(
            f"verl {verl.__version__} has {lacks[0]}, which routing replay stands on; this foreroute was tested with "
            f"verl {PEERS['verl'].newest}. Install that, or a newer foreroute"
        )


def _lacking(engine: type, name: str, wanted: tuple[str, ...]) -> str | None:
    method = getattr(engine, name, None)
    if method is None:
        return f"no {engine.__name__}.{name}"
    missing = [parameter for parameter in wanted if parameter not in inspect.signature(method).parameters]
    return f"{engine.__name__}.{name} without {', '.join(missing)}" if missing else None
