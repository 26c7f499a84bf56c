"""Questions to devices about batches, whose answers the host reads later.

A batch on a GPU is compared with its routes there. Who reads the answer at once waits for all that was launched before
it. So the host goes on. It reads an answer that has arrived when a later pass begins, and waits for the others once,
before an optimizer changes weights. On the CPU there is nothing to wait for: it reads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .errors import ReplayError

_before_step: set[DeferredChecks] = set()
"""Those that the next step of any optimizer waits for."""


class DeferredChecks:
    """Checks of one model. A copy has none."""

    def __init__(self) -> None:
        self._asked: dict[torch.device, _Asked] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredChecks, ()

    def add(self, wrong: Tensor, raise_error: Callable[[], object]) -> None:
        """Ask whether a batch is wrong. Earlier answers are read if they have arrived.

        Args:
            wrong: bool [], on the device of the batch.
            raise_error: compares the batch on the host, and raises what is wrong with it.

        Raises:
            Exception: what `raise_error` raises, for this batch on the CPU, elsewhere for an earlier one.
        """
        if wrong.device.type == "cpu":
            _raise_errors(wrong, [raise_error])
            return
        self.look()
        device = wrong.device
        before = self._asked.get(device)
        raisers = [raise_error] if before is None else [*before.raisers, raise_error]
        wrong = wrong if before is None else before.wrong | wrong
        answer = copied = None
        if wrong.is_cuda:
            # the copy runs on a stream of the tensor's device; an event would record on one of the current device
            answer, copied = wrong.to("cpu", non_blocking=True), torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
        self._asked[device] = _Asked(wrong, raisers, answer, copied)
        _watch_optimizers()
        _before_step.add(self)

    def close(self) -> None:
        """Leave the wait to the next step of any optimizer of torch, if gradients are recorded. Raises as `add`."""
        if self._asked and torch.is_grad_enabled():
            self.look()
        elif self._asked:  # nobody may ever step
            self.wait()

    def wait(self) -> None:
        """Read every answer; the device must have begun the last pass. Raises as `add`."""
        self._read(list(self._asked))

    def look(self) -> None:
        """Read the answers that have arrived. Raises as `add`."""
        self._read([device for device, asked in self._asked.items() if asked.copied and asked.copied.query()])

    def _read(self, devices: Sequence[torch.device]) -> None:
        every = [self._asked.pop(device) for device in devices]
        if not self._asked:
            _before_step.discard(self)
        for wrong, raisers, answer, copied in every:
            if copied is not None:
                copied.synchronize()
            _raise_errors(wrong if answer is None else answer, raisers)


class _Asked(NamedTuple):
    """Questions to one device since the last answer was read."""

    wrong: Tensor  # bool [], whether any batch is
    raisers: list[Callable[[], object]]
    answer: Tensor | None  # `wrong` on the host, behind `copied`; None where a device has no events
    copied: torch.cuda.Event | None


def raise_where(wrong: Tensor, message: str) -> None:
    """Raise `ReplayError` if bool [] is true, for which the host waits."""
    if wrong.item():
        raise ReplayError(message)


@cache  # the hook stays: torch walks through its hooks while it calls them
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_wait_before_step)


def _wait_before_step(*_: object) -> None:
    for checks in list(_before_step):
        checks.wait()


def _raise_errors(wrong: Tensor, raisers: Sequence[Callable[[], object]]) -> None:
    if wrong.item():
        for raise_error in raisers:
            raise_error()
        raise ReplayError("internal error: the device check failed and the host check passed; please report it")
