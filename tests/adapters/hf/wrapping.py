"""Ways to checkpoint the layers of a model, by name."""

import functools

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from driving import enable_checkpointing


def wrap_layers(model, impl):
    model.train()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=impl),
        check_fn=lambda module: type(module).__name__.endswith("DecoderLayer"),
    )


CHECKPOINTING = {
    "plain": lambda model: model.train(),
    "reentrant": lambda model: enable_checkpointing(model, True),
    "non_reentrant": lambda model: enable_checkpointing(model, False),
    "wrapper_reentrant": lambda model: wrap_layers(model, CheckpointImpl.REENTRANT),
    "wrapper_non_reentrant": lambda model: wrap_layers(model, CheckpointImpl.NO_REENTRANT),
}
