"""What a device is asked about a batch while the host goes on, and the host looks at before weights change.

A batch that is on a GPU is compared with its routes there. Whoever read the answer at once would wait for all that was
launched before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class LateChecks:
    """Checks of the passes of a session, or of those of a whole step.

    Args:
        of_step: whether the end of a session in which gradients are recorded leaves the wait to the next step of any
            optimizer of torch.
    """

    def __init__(self, *, of_step: bool = False) -> None:
        self._of_step = of_step
        self._wrong: Tensor | None = None
        self._answer: tuple[Tensor, torch.cuda.Event] | None = None
        self._tells: list[Callable[[], object]] = []
        self._hook: Any = None

    def add(self, wrong: Tensor, tell: Callable[[], object]) -> None:
        """Ask whether a batch is wrong. Earlier answers are looked at if they are there.

        Args:
            wrong: bool [], on the device.
            tell: compares the batch on the host, and raises what is wrong with it.

        Raises:
            Exception: what `tell` raises, for an earlier batch.
        """
        self.look()
        self._wrong = wrong if self._wrong is None else self._wrong | wrong
        self._tells.append(tell)
        if wrong.is_cuda:
            self._answer = self._wrong.to("cpu", non_blocking=True), torch.cuda.Event()
            self._answer[1].record()
        if self._of_step and self._hook is None:
            self._hook = register_optimizer_step_pre_hook(lambda *_: self.wait())

    def close(self) -> None:
        """The session ends. Raises as `add`."""
        if self._of_step and torch.is_grad_enabled():
            self.look()
        else:
            self.wait()

    def wait(self) -> None:
        """Look at every answer, for which the device must have begun the last pass. Raises as `add`."""
        wrong, answer, tells = self._wrong, self._answer, self._tells
        self._wrong, self._answer, self._tells = None, None, []
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if wrong is None:
            return
        if answer is not None:
            wrong, brought = answer
            brought.synchronize()
        if wrong.item():
            for tell in tells:
                tell()
            raise AssertionError("the device finds a batch wrong that the host finds right")

    def look(self) -> None:
        """Look at the answers if a GPU has given them. Raises as `add`."""
        if self._answer is not None and self._answer[1].query():
            self.wait()
