"""Rollouts that are sampled while earlier steps are still trained on.

    max_staleness = 1         step 0          step 1          step 2
    weights' version          0               1               2
    thread of the engine      rollouts 0, 1   rollout 2       rollout 3
    trainer trains on         rollout 0       rollout 1       rollout 2

The rollout of step t is sampled with the weights of version max(0, t - max_staleness). That is fixed by numbers of
steps and not by what is ready when, so that a run repeats, and a resumed one ends, with the same bits. Whatever is
missing for that, at the beginning, is sampled with the weights of the step that it is missed at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from foreroute.capture import Generation
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.trace.checks import check_rows
from foreroute.trace.streams import KINDS
from foreroute.train.ranks import use_device
from foreroute.train.rollout import Experience, SamplingRounds

Sample = Callable[[int, int, Mapping[str, Tensor]], Experience]
"""Samples the rollout of a step, with weights and their version."""
T = TypeVar("T")


class AsyncRollouts:
    """Samples in a thread of its own, one rollout after another. Nothing else may use the engine.

    Args:
        sample: what the thread calls.
        max_staleness: by how many versions the weights of a rollout are older than those that train on it.
        threads: of torch, within the thread.
        device: of the engine.
    """

    def __init__(self, sample: Sample, max_staleness: int, threads: int, device: torch.device) -> None:
        self._sample = sample
        self._max_staleness = max_staleness
        self._ordered: dict[int, Future[Experience]] = {}
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="foreroute-rollouts", initializer=use_device, initargs=(device, threads)
        )

    def order(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Have everything sampled that is still missing, up to `max_staleness` steps from now.

        Args:
            version: of the weights, which is the step that begins.
            weights: are copied, and may change afterwards.
        """
        copies = {name: weight.detach().clone() for name, weight in weights.items()}
        first = max(self._ordered, default=version - 1) + 1
        for step in range(first, version + self._max_staleness + 1):
            self._ordered[step] = self._worker.submit(self._sample, step, version, copies)

    def take(self, step: int) -> Experience:
        """Wait for the rollout of a step. Raises what sampling it raised."""
        return self._ordered.pop(step).result()

    def in_thread(self, work: Callable[[], T]) -> T:
        """Have the thread do something else with the engine, after what was ordered, and wait for it."""
        return self._worker.submit(work).result()

    def state(self) -> dict[int, Any]:
        """Wait for the rollouts of steps to come, and give them by step."""
        return {step: stored(rollout.result()) for step, rollout in self._ordered.items()}

    def restore(self, state: Mapping[int, Any], spec: RoutingSpec) -> None:
        """Take up what `state` gave; `spec` is the model's."""
        for step, values in state.items():
            self._ordered[step] = Future()
            self._ordered[step].set_result(restored(values, spec))

    def close(self) -> None:
        """End the thread; what has not begun is not sampled any more."""
        self._worker.shutdown(cancel_futures=True)


def stored(experience: Experience) -> dict[str, Any]:
    """Take a rollout apart into tensors and plain values, which a checkpoint can hold."""
    generation = experience.generation
    return {
        "trace": _values(generation.trace, "spec", "streams"),
        "streams": {
            name: {"kind": each.kind, "facts": each.facts(), "arrays": _tensors(each.arrays())}
            for name, each in generation.trace.streams.items()
        },
        "generation": _values(generation, "trace"),
        "experience": _values(experience, "generation", "sampled"),
        "sampled": _values(experience.sampled),
    }


def restored(state: Mapping[str, Any], spec: RoutingSpec) -> Experience:
    """Put a stored rollout together again.

    Raises:
        KeyError, TypeError, ValueError: when it is something else.
        TraceContentError: when routes are not those of a model with this spec, or a stream cannot be one.
    """
    parts = {part: _arrays(state[part]) for part in ("trace", "generation", "experience", "sampled")}
    trace = RoutingTrace(spec, **parts["trace"])
    check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, spec)
    for name, values in state["streams"].items():
        empty = KINDS[values["kind"]].from_facts(values["facts"], spec)
        trace = trace.with_stream(name, replace(empty, **_arrays(values["arrays"])))
    generation = Generation(trace, **parts["generation"])
    return Experience(generation, sampled=SamplingRounds(**parts["sampled"]), **parts["experience"])


def _arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in values.items()}


def _values(holder: Any, *without: str) -> dict[str, Any]:
    """Give all fields of a dataclass but those that are stored on their own; arrays as tensors of their own."""
    values = {each.name: getattr(holder, each.name) for each in fields(holder) if each.name not in without}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in _tensors(values).items()}


def _tensors(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
