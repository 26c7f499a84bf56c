"""Parameters whose values are dealt out to processes by DeepSpeed's ZeRO stage 3: having them whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


def gathered_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the `state_dict()` of the policy, one tensor gathered at a time; engines gather those of FSDP2."""
    for name, weight in policy.state_dict(keep_vars=True).items():
        whole = weight.detach()
        if hasattr(weight, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([weight]):
                whole = weight.detach().to("cpu", copy=True)  # what is gathered is let go behind the context
        yield name, whole


@contextmanager
def whole_where_run(policy: nn.Module) -> Iterator[None]:
    """While the context is open, each layer has its parameters whole while it runs, and what is in no layer its own.

    At ZeRO stage 3 transformers deals them out where it loads a model for a trainer, and training puts hooks on it that
    gather them. This is for forwards in between.
    """
    running: list[AbstractContextManager[Any]] = []  # of modules that run in one another

    def gather(parameters: list[nn.Parameter], *_: Any) -> None:
        import deepspeed

        running.append(deepspeed.zero.GatheredParameters(parameters))
        running[-1].__enter__()

    def release(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module, parameters in _gathered_together(policy):
            if any(hasattr(parameter, "ds_id") for parameter in parameters):
                stack.callback(module.register_forward_pre_hook(partial(gather, parameters)).remove)
                stack.callback(module.register_forward_hook(release, always_call=True).remove)
        yield


def _gathered_together(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    # whole layers, as PEFT's wrappers read parameters of what they wrap; elsewhere each module and its own
    if isinstance(module, nn.ModuleList):
        yield from ((layer, list(layer.parameters())) for layer in module)
        return
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        yield from _gathered_together(child)
