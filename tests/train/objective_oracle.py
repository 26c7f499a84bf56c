"""The objectives once more, written from the papers as loops over single tokens in float64, for a whole mini-batch."""

from dataclasses import dataclass

import numpy as np

from foreroute.train.config import RLConfig


@dataclass
class Case:
    """Random sequences: the engine, the trainer before the update, and now, each a little further away."""

    lengths: np.ndarray
    now: np.ndarray
    old: np.ndarray
    engine: np.ndarray
    advantages: np.ndarray

    @classmethod
    def random(cls, seed, *, lengths=None):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 9, 6) if lengths is None else np.array(lengths)
        old = -rng.exponential(1.0, int(lengths.sum())) - 0.1
        now, engine = (old + 0.3 * rng.standard_normal(len(old)) for _ in range(2))
        return cls(lengths, now, old, engine, rng.standard_normal(len(lengths)))

    def spans(self):
        ends = np.cumsum(self.lengths)
        return list(zip(ends - self.lengths, ends, strict=True))


def mini_batch_loss(case: Case, config: RLConfig, now: np.ndarray) -> float:
    """The loss at `now`."""
    total, low, high = 0.0, 1 - config.clip_low, 1 + config.clip_high
    for (start, end), advantage in zip(case.spans(), case.advantages, strict=True):
        drift = np.exp(np.mean(now[start:end] - case.old[start:end]))
        for t in range(start, end):
            r = drift if config.method == "gspo" else np.exp(now[t] - case.old[t])
            loss = -min(r * advantage, min(max(r, low), high) * advantage)
            if config.correction.kind == "tis":
                loss *= min(np.exp(case.old[t] - case.engine[t]), config.correction.high)
            total += loss / (end - start if config.method == "gspo" else 1)
    return total / (len(case.lengths) if config.method == "gspo" else case.lengths.sum())


def differences(case: Case, config: RLConfig) -> np.ndarray:
    """The gradient by central differences."""
    step, gradient = 1e-6, np.zeros_like(case.now)
    for t in range(len(case.now)):
        up, down = case.now.copy(), case.now.copy()
        up[t] += step
        down[t] -= step
        losses = [mini_batch_loss(case, config, now) for now in (up, down)]
        gradient[t] = (losses[0] - losses[1]) / (2 * step)
    return gradient
