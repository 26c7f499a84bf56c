"""Parameters whose values are dealt out to processes, by DeepSpeed's ZeRO stage 3 or FSDP2: having them whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def whole_weights(trainer: Any, policy: nn.Module) -> dict[str, Tensor]:
    """The `state_dict()` of the policy, whole in every process, all of which call this.

    What is dealt out is gathered one tensor at a time and kept on the host, so that no device holds the whole model.

    Args:
        trainer: TRL's.
        policy: its model, unwrapped.
    """
    weights = policy.state_dict(keep_vars=True)
    if trainer.is_deepspeed_enabled:
        import deepspeed

        for name, each in weights.items():
            if hasattr(each, "ds_id"):
                with deepspeed.zero.GatheredParameters([each]):
                    weights[name] = each.detach().to("cpu", copy=True)
    return {name: each.full_tensor().cpu() if isinstance(each, DTensor) else each for name, each in weights.items()}


@contextmanager
def whole_where_run(trainer: Any, policy: nn.Module) -> Iterator[None]:
    """While the context is open, each layer has its parameters whole while it runs, and what is in no layer its own.

    At ZeRO stage 3 transformers deals them out where it loads a model for a trainer, and training puts hooks on it that
    gather them. This is for forwards in between. Arguments as in `whole_weights`.
    """
    if not trainer.is_deepspeed_enabled:
        yield
        return
    import deepspeed

    running: list[AbstractContextManager[Any]] = []  # of modules that run in one another

    def gather(parameters: list[nn.Parameter], *_: Any) -> None:
        running.append(deepspeed.zero.GatheredParameters(parameters))
        running[-1].__enter__()

    def release(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module, parameters in dict(_parts(policy)).items():
            if any(hasattr(parameter, "ds_id") for parameter in parameters):
                stack.callback(module.register_forward_pre_hook(partial(gather, parameters)).remove)
                stack.callback(module.register_forward_hook(release, always_call=True).remove)
        yield


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Whole layers, as PEFT's wrappers read parameters of what they wrap; elsewhere each module and its own."""
    if isinstance(module, nn.ModuleList):
        yield from ((layer, list(layer.parameters())) for layer in module)
        return
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        yield from _parts(child)
