"""Replay on the launch path of a forward on Hugging Face: waits of the host for the device, and operators.

Both are counted on a device that stands in for a GPU, beyond what the unpatched model does there. Tests count waits of
other batches and of Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foreroute.adapters import hf
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.testing.models import FAMILIES

LENGTHS, VOCABULARY, NUM_LAYERS = (9, 6, 4), 50, 4


class Launches(TorchDispatchMode):
    """Counts operators while it is open, backward ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def launches(work: Callable[[], object]) -> int:
    """Count the operators of one call, those of backward too."""
    counting = Launches()
    with counting:
        work()
    return counting.number


def added(rank: int, num_ranks: int) -> dict[str, Any]:
    """Count what replay adds to a padded batch, alone in a process, whose CUDA the device stands in for.

    It gives `waits`, of the host in a forward; and `aten`, operators added to a forward and to forward plus backward,
    whose rows were made before, and to the first forward.
    """
    sizes = FAMILIES["qwen3_moe"] | {"num_hidden_layers": NUM_LAYERS}
    model = hf.build_model("qwen3_moe", seed=0, experts_implementation="batched_mm", **sizes)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_side="left")
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    routed = hf.attach(model)
    with routed.record() as recording, torch.no_grad():
        model(**batch, use_cache=False)
    trace = recording.trace()
    with other_device() as device:
        routed = hf.attach(model.to(DEVICE))
        there = {key: value.to(DEVICE) for key, value in batch.items()}

        def forward() -> Tensor:
            logits: Tensor = model(**there, use_cache=False).logits
            return logits

        def waits() -> int:
            device.reads.clear()
            with torch.no_grad():
                forward()
            return device.reads.total()

        def operators() -> tuple[int, int]:
            return launches(forward), launches(lambda: forward().sum().backward())

        native, own = waits(), operators()
        with routed.replay(trace):
            replayed = waits()
        with routed.replay(trace):
            first = launches(forward)
            again = operators()
    aten = {"first_forward": first - own[0], "forward": again[0] - own[0], "step": again[1] - own[1]}
    return {"waits": replayed - native, "aten": aten}
