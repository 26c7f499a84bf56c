"""The objectives once more, written from the papers as loops over single tokens in float64, for a whole mini-batch."""

from dataclasses import dataclass

import numpy as np

from foreroute.train.config.rl import RLConfig


@dataclass
class Case:
    """Random sequences: the engine, the trainer before the update, and now, each a little further away."""

    lengths: np.ndarray
    now: np.ndarray
    old: np.ndarray
    engine: np.ndarray
    reference: np.ndarray
    advantages: np.ndarray
    max_length: int = 9

    @classmethod
    def random(cls, seed, *, spread=0.3, sequences=6, lengths=None):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 9, sequences) if lengths is None else np.array(lengths)
        total = int(lengths.sum())
        old = -rng.exponential(1.0, total) - 0.1
        return cls(
            lengths,
            old + spread * rng.standard_normal(total),
            old,
            old + spread * rng.standard_normal(total),
            old + spread * rng.standard_normal(total),
            rng.standard_normal(len(lengths)),
        )

    def spans(self):
        ends = np.cumsum(self.lengths)
        return list(zip(ends - self.lengths, ends, strict=True))


def mini_batch_loss(case: Case, config: RLConfig, now: np.ndarray, at: np.ndarray) -> float:
    """The loss at `now`, with everything that no gradient goes through taken at `at`."""
    total = 0.0
    for (start, end), advantage in zip(case.spans(), case.advantages, strict=True):
        length = end - start
        drift = np.exp(np.mean(now[start:end] - case.old[start:end]))
        for t in range(start, end):
            loss = weight(case, config, at, start, end, t) * one_token(case, config, now, at, t, advantage, drift)
            if config.kl_coefficient:
                x = np.exp(case.reference[t] - now[t])
                loss += config.kl_coefficient * (x - np.log(x) - 1)
            total += {"token": 1, "sequence": 1 / length, "constant": 1 / case.max_length}[config.mean] * loss
    return total / (case.lengths.sum() if config.mean == "token" else len(case.lengths))


def one_token(case, config, now, at, t, advantage, drift):
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.loss == "clip":
        r = drift if config.ratio == "sequence" else np.exp(now[t] - case.old[t])
        return -min(r * advantage, min(max(r, low), high) * advantage)
    r = np.exp(at[t] - case.old[t])
    if config.loss == "cispo":
        return -min(max(r, low), high) * advantage * now[t]
    masked = r > high if advantage > 0 else r < low
    own_weight = r if config.correction.kind == "none" else 1.0
    return 0.0 if masked else -own_weight * advantage * now[t]


def weight(case, config, at, start, end, t):
    rule = config.correction
    behind = at if config.loss == "reinforce" else case.old
    gap = behind - case.engine
    rho = np.exp(gap[start:end].sum() if rule.level == "sequence" else gap[t])
    if rule.kind == "none":
        return 1.0
    if rule.kind == "tis":
        return min(rho, rule.high)
    kept = rho <= rule.high and (rule.kind == "mis" or rho >= rule.low)
    return rho if kept else 0.0


def differences(case: Case, config: RLConfig) -> np.ndarray:
    """The gradient by central differences."""
    step, gradient = 1e-6, np.zeros_like(case.now)
    for t in range(len(case.now)):
        up, down = case.now.copy(), case.now.copy()
        up[t] += step
        down[t] -= step
        losses = [mini_batch_loss(case, config, now, case.now) for now in (up, down)]
        gradient[t] = (losses[0] - losses[1]) / (2 * step)
    return gradient
