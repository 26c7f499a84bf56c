"""The optimizer: AdamW, on float32 copies of the weights where the model has them in less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

IN_FLOAT32 = ("master", "exp_avg", "exp_avg_sq")
"""What `MasterAdamW` keeps of each parameter, next to the number of its steps."""


def make_optimizer(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Make AdamW over the parameters of a model, with the options of `torch.optim.AdamW`."""
    parameters = list(model.parameters())
    low = any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in parameters)
    return (MasterAdamW if low else torch.optim.AdamW)(parameters, **options)


def load_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state, of which torch itself checks the number of parameters alone.

    Raises:
        ValueError: when it is of parameters of other shapes.
        KeyError: when it is none.
    """
    optimizer.load_state_dict(dict(state))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise ValueError(
                        f"{name} of shape {list(value.shape)} is not that of a weight of shape {list(parameter.shape)}"
                    )


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose weights are float32 and stay in its state, as "master"; parameters are what these round to.

    A bfloat16 weight has 8 significant bits: a step below a 512th of it would be lost. Here such steps add up until the
    weight rounds to its neighbour (mixed precision training, arXiv 1710.03740, section 3.1).
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step with the gradients at hand, in float32. `closure` is not for this optimizer."""
        assert closure is None, "gradients are accumulated before the step"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in trained]
            adamw(
                [state["master"] for state in states],
                [parameter.grad.float() for parameter in trained],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter, state in zip(trained, states, strict=True):
                parameter.copy_(state["master"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state without rounding it to the dtype of the parameters, as torch does."""
        super().load_state_dict(dict(state_dict))
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for position, values in state_dict["state"].items():
            own = self.state[parameters[position]]
            own.update({name: values[name].to(own[name].device, torch.float32, copy=True) for name in IN_FLOAT32})

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            master = parameter.detach().to(torch.float32, copy=True)
            state.update(
                step=torch.tensor(0.0),
                master=master,
                exp_avg=torch.zeros_like(master),
                exp_avg_sq=torch.zeros_like(master),
            )
        return state
