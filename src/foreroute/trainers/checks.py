"""Checks of every trainer: the methods that replay stands on, and the routes of the first rollout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from foreroute.adapters.versions import PEERS
from foreroute.errors import AttachError, ConfigError, ForerouteError, RankError, ReplayError
from foreroute.mismatch import Defect, explain
from foreroute.replay import RoutedModel
from foreroute.trace import RoutingTrace

Value = TypeVar("Value")
Refusals = Sequence[tuple[object, str]]
"""Conditions, and what is said where one holds: what was seen, and what to do."""
DRIFT = (Defect.WEIGHT_VERSION, Defect.UNEXPLAINED)
"""Defects that rounding and other weights may look like; anything else is a mix-up on the way."""


def require_overridden(peer: str, version: str, derived: type, base: type) -> None:
    """Raise `AttachError` unless a peer's class has all methods that a derived one overrides, naming one it lacks."""
    # an override of a method that is gone would be called by nobody, and replay would not happen
    classes = [each for each in derived.__mro__ if each not in base.__mro__]
    overrides = [name for each in classes for name, value in vars(each).items() if isfunction(value)]
    if lacks := [name for name in overrides if not hasattr(base, name)]:
        raise AttachError(
            f"{peer} {version} has no {base.__name__}.{lacks[0]}, which routing replay stands on; this foreroute was "
            f"tested with {peer} {PEERS[peer].newest}. Install that, or a newer foreroute"
        )


def refuse(why: str, refusals: Refusals) -> None:
    """Raise one `ConfigError` with all messages whose condition holds, and `why` before them."""
    found = [message for refused, message in refusals if refused]
    if len(found) == 1:
        raise ConfigError(f"{why} {found[0]}".lstrip())
    if found:
        raise ConfigError("\n- ".join([f"{why} {len(found)} settings are in the way:".lstrip(), *found]))


def check_first_rollout(
    routed: RoutedModel,
    rollout: RoutingTrace,
    forward: Callable[[], object],  # on the same tokens; sequences of padding may stand behind them
    *,
    # makes the rollout's sequences of what this process recorded, where that is parts of them or has padding in it
    sequences_of: Callable[[RoutingTrace], RoutingTrace] | None = None,
) -> None:
    """Hold the routes of a rollout against those that the policy picks natively at the same weights.

    Raises `ReplayError`, naming the mix-up, for routes that stand at other positions, in other sequences or layers, or
    are physical ids: once they are replayed, they look right. Routes that are only far apart are warned of.
    """
    with (
        torch.no_grad(),
        torch.random.fork_rng(range(torch.cuda.device_count())),
        warnings.catch_warnings(),
        routed.record() as recording,
    ):
        # what torch says of reentrant checkpointing without gradients
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        forward()
    recorded = recording.trace()
    native = recorded.select(np.arange(len(rollout))) if sequences_of is None else sequences_of(recorded)
    found = explain(native, rollout, names=("the trainer's own trace", "the rollout's trace"))
    if found.defect in DRIFT:
        warnings.warn(f"the first rollout's routes are far from the trainer's own: {found.sentence}", stacklevel=2)
    elif found.defect is not Defect.NONE:
        raise ReplayError(f"the first rollout's routes are not those of its tokens ({found.defect}). {found.sentence}")


def judge_together(judge: Callable[[], Value], add_up: Callable[[Tensor], Tensor]) -> Value:
    """Judge on every process. All go on, or none: who raised alone would leave the rest waiting. A collective call.

    `add_up` adds a number up over all processes.
    """
    error, found = None, None
    try:
        found = judge()
    except ForerouteError as raised:
        error = raised
    if float(add_up(torch.tensor(float(error is not None)))):
        raise error or RankError("a rollout was refused on another rank, whose log says why")
    return found  # type: ignore[return-value]  # without an error there is one
