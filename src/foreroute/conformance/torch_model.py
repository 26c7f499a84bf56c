"""Parts that torch frameworks share under the kit: weights, gradients, padding, an injected error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.conformance.adapter import Batch, Seen


class TorchModel:
    """A model whose weights and gradients the kit reads and changes. Subclasses run it, with their probe."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def gradients(self) -> dict[str, NDArray[Any]]:
        """Give the gradient of every parameter that has one."""
        named = self.model.named_parameters()
        return {name: _array(weight.grad).copy() for name, weight in named if weight.grad is not None}

    @torch.no_grad()
    def add_to(self, name: str, delta: NDArray[Any]) -> None:
        """Change a parameter in place."""
        parameter = self.model.get_parameter(name)
        parameter.add_(torch.from_numpy(delta).to(parameter.device))


@dataclass(frozen=True, eq=False)
class TorchStep:
    """A forward that has run."""

    seen: Seen
    loss: Tensor

    def backward(self) -> None:
        """Differentiate the loss."""
        self.loss.backward()


def padded(batch: Batch, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Lay a batch out as tokens int64 [B, T], and bool [B, T], True where they are real."""
    input_ids = torch.zeros(len(batch.sequences), batch.width, dtype=torch.long)
    real_BT = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, tokens in enumerate(batch.sequences):
        columns = slice(batch.width - len(tokens), None) if batch.padding == "left" else slice(0, len(tokens))
        input_ids[row, columns] = torch.from_numpy(tokens.astype(np.int64))
        real_BT[row, columns] = True
    return input_ids.to(device), real_BT.to(device)


def raise_once(block: nn.Module) -> None:
    """Make the next forward of a block raise, and only that: `Fault.FORWARD_RAISES`."""

    def fail(*_: Any) -> None:
        handle.remove()
        raise ArithmeticError("injected")

    handle = block.register_forward_pre_hook(fail)


def _array(gradient: Tensor) -> NDArray[Any]:
    """Copy a gradient to the host."""
    # numpy has no bfloat16
    wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient
    array: NDArray[Any] = wide.cpu().numpy()
    return array
