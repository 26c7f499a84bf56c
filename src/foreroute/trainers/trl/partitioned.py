"""DeepSpeed's ZeRO stage 3 deals the values of parameters out to processes: having them whole for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn


def whole(trainer: Any, policy: nn.Module) -> AbstractContextManager[Any]:
    """While the context is open, all parameters are whole in every process.

    Args:
        trainer: TRL's.
        policy: its model, unwrapped.
    """
    if not trainer.is_deepspeed_enabled:
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(policy.parameters()))
    return gathered


@contextmanager
def whole_where_run(trainer: Any, policy: nn.Module) -> Iterator[None]:
    """While the context is open, each module has its own parameters whole while it runs.

    transformers deals them out where it loads a model for a trainer, and training puts hooks on it that gather them.
    This is for forwards in between. Arguments as in `whole`.
    """
    if not trainer.is_deepspeed_enabled:
        yield
        return
    import deepspeed

    running: dict[nn.Module, AbstractContextManager[Any]] = {}

    def gather(module: nn.Module, _: Any) -> None:
        running[module] = deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)))
        running[module].__enter__()

    def release(module: nn.Module, *_: Any) -> None:
        running.pop(module).__exit__(None, None, None)

    with ExitStack() as stack:
        for module in policy.modules():
            if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):
                stack.callback(module.register_forward_pre_hook(gather).remove)
                stack.callback(module.register_forward_hook(release, always_call=True).remove)
        yield
