"""Rollouts that are sampled while earlier steps are still trained on.

    max_staleness = 1         step 0          step 1          step 2
    weights' version          0               1               2
    thread of the engine      rollouts 0, 1   rollout 2       rollout 3
    trainer trains on         rollout 0       rollout 1       rollout 2

The rollout of step t is sampled with the weights of version max(0, t - max_staleness). That is fixed by numbers of
steps and not by what is ready when, so that a run repeats, and a resumed one ends, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from foreroute.train.rollout import Experience

Sample = Callable[[int, int, Mapping[str, Tensor]], Experience]
"""Of a step, with weights and their version."""


class RolloutsAhead:
    """Samples in a thread of its own, one rollout after another. Nothing else may use the engine.

    Args:
        sample: what the thread calls.
        max_staleness: by how many versions the weights of a rollout are older than those that train on it.
        threads: of torch, within the thread.
    """

    def __init__(self, sample: Sample, max_staleness: int, threads: int) -> None:
        self._sample = sample
        self._max_staleness = max_staleness
        self._ordered: dict[int, Future[Experience]] = {}
        self._worker = ThreadPoolExecutor(
            1, thread_name_prefix="foreroute-rollouts", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def order(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Have everything sampled that is sampled with these weights. They are copied, and may change afterwards."""
        copies = {name: weight.detach().clone() for name, weight in weights.items()}
        last = version + self._max_staleness
        for step in range(last if version else 0, last + 1):
            self._ordered[step] = self._worker.submit(self._sample, step, version, copies)

    def take(self, step: int) -> Experience:
        """The rollout of a step, which is waited for. Raises what sampling it raised."""
        return self._ordered.pop(step).result()

    def waiting(self) -> dict[int, Experience]:
        """The rollouts of steps to come, all of which are waited for."""
        return {step: rollout.result() for step, rollout in self._ordered.items()}

    def restore(self, waiting: Mapping[int, Experience]) -> None:
        """Take up what `waiting` gave, in place of what was ordered."""
        for rollout in self._ordered.values():
            rollout.cancel()
        self._ordered.clear()
        for step, experience in waiting.items():
            self._ordered[step] = Future()
            self._ordered[step].set_result(experience)

    def close(self) -> None:
        """End the thread; what has not begun is not sampled any more."""
        self._worker.shutdown(cancel_futures=True)
