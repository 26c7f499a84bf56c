"""Log-probs of exactly 0, which nobody filled in: named with their sequences, and not taken for another cause."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.doctor import Severity


def both(seed, *, peak=0.0, shape=(8, 64)):
    """Log-probs in float32 of a trainer and an engine; of so many tokens the policy is so sure that float32 says 0."""
    rng = np.random.default_rng(seed)
    trainer = -rng.exponential(1.0, shape)
    sure = rng.random(shape) < peak
    trainer = np.where(sure, -rng.exponential(1e-6, shape) * (rng.random(shape) < 0.5), trainer)
    noise = np.where(sure, np.exp(rng.normal(0, 0.5, shape)), 1 + rng.normal(0, 0.01, shape))
    return trainer.astype(np.float32), (trainer * noise).astype(np.float32)


def told(found):
    """The findings about zeros, and whether any other cause is named."""
    zeros = [each.sentence for each in found.findings if "has log-probs of exactly 0" in each.sentence]
    verdicts = ("top-p", "Causes can be", "of other sequences", "shifted", "makes it worse", "R3 helps by", "little")
    return zeros, [each.sentence for each in found.findings if any(words in each.sentence for words in verdicts)]


UNFILLED = {
    "one sequence": (np.s_[3], "64 response tokens of 1 sequence (3)"),
    "a stretch": (np.s_[5, 20:50], "30 response tokens of 1 sequence (5)"),
    "all": (np.s_[:], "512 response tokens of 8 sequences (0, 1, 2, 3, 4, 5, 6, 7)"),
}


@pytest.mark.parametrize("side", ["engine", "trainer", "replayed"])
@pytest.mark.parametrize("name", UNFILLED)
def test_unfilled_log_probs_are_named_with_their_sequences(name, side):
    where, words = UNFILLED[name]
    trainer, engine = both(0)
    sides = {"trainer": trainer, "replayed": (trainer + engine) / 2, "engine": engine}
    sides[side][where] = 0
    found = fr.compare(sides["trainer"], sides["engine"], np.ones((8, 64)), replayed_logprobs=sides["replayed"])
    zeros, other = told(found.diagnosis)
    whose = {"engine": "The engine", "trainer": "The trainer", "replayed": "The trainer, under replay,"}[side]
    assert zeros[0].startswith(f"{whose} has log-probs of exactly 0, probability 1, for {words}, where"), zeros
    assert (len(zeros), other) == (1, [])
    assert found.diagnosis.headline.startswith(f"Fix this first: {zeros[0]}")


@pytest.mark.parametrize("padding", [0, 20])
def test_a_mask_that_marks_prompts_is_told(padding):
    """Both sides are filled with 0 outside of responses; a template that begins all of them is not such."""
    trainer, engine = both(0)
    for each in (trainer, engine):
        each[:, 64 - padding :] = 0
        each[:, :2] = 0
    apart = fr.compare(trainer, engine, np.ones_like(engine)).diagnosis
    assert not [each for each in apart.findings if "as where a mask marks prompts" in each.sentence]
    lengths = np.array([3, 5, *range(14, 20)])
    for each in (trainer, engine):
        each[np.arange(64) < lengths[:, None]] = 0
    told_now = fr.compare(trainer, engine, np.ones_like(engine)).diagnosis
    assert told_now.headline.startswith("Look at this: Every sequence begins with response tokens whose log-prob")
    assert f"{lengths.sum()} of 512 in all" in told_now.headline
    first = trainer[0].copy()
    trainer[0] = engine[0] - 0.01  # one sequence begins otherwise
    assert "as where a mask marks" not in str(fr.compare(trainer, engine, np.ones_like(engine)).diagnosis.findings)
    trainer[0] = first
    kept = np.arange(64) >= lengths[:, None]
    right = fr.compare(trainer, engine, kept & (np.arange(64) < 64 - padding)).diagnosis
    assert right.worst < Severity.WARNING


@pytest.mark.parametrize("seed", range(4))
def test_a_peaked_policy_is_not_accused(seed):
    """Many of its log-probs are 0 in float32, nearly 0 on the other side; and one token is far off, as of a flipped
    route, in the middle of them."""
    trainer, engine = both(seed, peak=[0.3, 0.9, 0.99, 1.0][seed % 4])
    engine[2, 10:40] = 0
    trainer[2, 10:40] = 0
    trainer[2, 20] = -9.0
    assert (engine == 0).sum() > 30
    found = fr.compare(trainer, engine, np.ones_like(engine)).diagnosis
    assert told(found)[0] == []
    greedy = fr.compare(np.zeros_like(engine), np.zeros_like(engine), np.ones_like(engine)).diagnosis
    assert (told(greedy)[0], greedy.worst) == ([], Severity.NOTE)


def drawn(seed, kept, *, sharpness=3.0, sequences=16, length=64, vocabulary=40):
    """Tokens drawn from what `kept` leaves of softmaxes, and their log-probs by a trainer and by the engine."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, sharpness, (sequences, length, vocabulary)).astype(np.float32)
    scores = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True).astype(np.float32)
    left = np.where(kept(np.exp(scores)), scores, -np.inf)
    left = (left - np.logaddexp.reduce(left, axis=-1, keepdims=True)).astype(np.float32)
    tokens = (left + rng.gumbel(size=left.shape)).argmax(axis=-1)[..., None]
    return tuple(np.minimum(np.take_along_axis(each, tokens, -1)[..., 0], 0) for each in (scores, left))


def top_p(most):
    """The most probable tokens, up to the one that makes `most` of the probability."""
    return lambda p: (np.where(p[..., None, :] > p[..., :, None], p[..., None, :], 0).sum(-1)) < most


@pytest.mark.parametrize(("most", "sharpness"), [(0.5, 3.0), (0.9, 10.0)])
def test_truncated_sampling_is_told_and_its_zeros_are_not_accused(most, sharpness):
    """Where one token is left to draw from, the engine's log-prob is exactly 0; the other tokens tell of the cut."""
    trainer, engine = drawn(0, top_p(most), sharpness=sharpness)
    assert (engine == 0).mean() > 0.02
    found = fr.compare(trainer, engine, np.ones_like(engine)).diagnosis
    assert told(found)[0] == []
    assert "fewer tokens" in found.headline
    whole = fr.compare(*drawn(1, lambda p: p >= 0, sharpness=sharpness), np.ones_like(engine)).diagnosis
    assert told(whole) == ([], [])
