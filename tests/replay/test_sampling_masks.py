"""Log-probabilities on recorded sets, against dense float64."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from foreroute.errors import BatchMismatchError, ConfigError, TraceContentError
from foreroute.replay import masked_logprobs, masked_logprobs_of_logits
from foreroute.replay import rows as uploads
from foreroute.replay.sampling_masks import masked_entropy_of_logits
from foreroute.testing.counting_device import DEVICE, other_device
from foreroute.trace import DecisionStream
from tests.traces import sets_of

VOCABULARY, WIDTH = 700, 12


def problem(seed=0, *, num_rows=23, dtype=torch.float64):
    """Sets of every kind: one token, a few, a large part, all but one, and no set at all."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 2, 5, 10, 11, 60, 699], num_rows)
    sizes[:8] = [0, 1, 2, 5, 10, 11, 60, 699]
    sets = [rng.choice(VOCABULARY, size, replace=False) for size in sizes]
    targets = torch.tensor([int(rng.choice(ids if len(ids) else VOCABULARY)) for ids in sets])
    masks = DecisionStream.from_sets(VOCABULARY, np.ones(num_rows, bool), sizes, np.concatenate(sets).astype(int))
    torch.manual_seed(seed)
    hidden = torch.randn(num_rows, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY + 4, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, head, targets, masks


def dense(logits_RV, targets_R, masks, temperature):
    """The oracle: -inf outside of the sets, log-softmax over all."""
    scaled = logits_RV[:, : masks.num_choices] / temperature
    left_out = torch.ones(scaled.shape, dtype=torch.bool)
    for row, (ids,) in enumerate(sets_of(masks)):
        left_out[row, ids or slice(None)] = False
    return scaled.masked_fill(left_out, -torch.inf).log_softmax(-1).gather(1, targets_R[:, None])[:, 0]


def by_logits(hidden, head, targets, masks, temperature=1.0):
    return masked_logprobs_of_logits(hidden @ head.T, targets, masks, temperature=temperature)


def by_hidden(hidden, head, targets, masks, temperature=1.0):
    return masked_logprobs(hidden, head, targets, masks, temperature=temperature)


@pytest.mark.parametrize(
    ("compute", "temperature", "numbers"), [(by_logits, 0.7, 1), (by_hidden, 1.0, 1 << 24), (by_hidden, 0.7, 2000)]
)
def test_values_and_gradients_are_those_of_the_dense_computation(compute, temperature, numbers, monkeypatch):
    """In one chunk, and in several."""
    monkeypatch.setattr("foreroute.replay.sampling_masks.BLOCK_NUMBERS", {"cpu": numbers})
    hidden, head, targets, masks = problem()
    weights = torch.randn(len(targets), dtype=torch.float64)
    expected = dense(hidden @ head.T, targets, masks, temperature)
    wanted = torch.autograd.grad((expected * weights).sum(), (hidden, head))
    found = compute(hidden, head, targets, masks, temperature)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    got = torch.autograd.grad((found * weights).sum(), (hidden, head))
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    single = torch.from_numpy(masks.counts_ND[:, 0] == 1)
    assert not found[single].any()
    assert not got[0][single].any()


VOCABULARY_RANKS = 3
PART = 350
"""Logits of a rank: the last of three has padding alone."""


@pytest.mark.slow
def test_ranks_that_share_the_vocabulary_have_the_values_and_gradients_of_one(workers):
    ranks = workers(VOCABULARY_RANKS).run(on_rank)
    hidden, head, targets, masks = problem()
    logits = (hidden @ head.T).detach().requires_grad_()
    expected = dense(logits, targets, masks, 0.7)
    (expected * torch.arange(len(targets))).sum().backward()
    for rank, (found, gradient, refused) in enumerate(ranks):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        part = logits.grad[:, rank * PART : (rank + 1) * PART]
        assert torch.allclose(gradient[:, : part.shape[1]], part, rtol=0, atol=1e-12)
        assert not gradient[:, part.shape[1] :].any()
        assert "leaves out its token" in refused


def on_rank(rank):
    hidden, head, targets, masks = problem()
    whole = torch.nn.functional.pad((hidden @ head.T).detach(), (0, VOCABULARY_RANKS * PART - len(head)), value=9.0)
    logits = whole[:, rank * PART : (rank + 1) * PART].clone().requires_grad_()
    ranks = dist.group.WORLD
    found = masked_logprobs_of_logits(logits, targets, masks, temperature=0.7, vocabulary_group=ranks)
    (found * torch.arange(len(targets))).sum().backward()
    with pytest.raises(BatchMismatchError) as refused:
        masked_logprobs_of_logits(logits, (targets + 1) % VOCABULARY, masks, vocabulary_group=ranks)
    return found.detach(), logits.grad, str(refused.value)


def test_the_entropy_is_that_of_the_dense_computation():
    hidden, head, targets, masks = problem()
    logits = (hidden @ head.T).detach()
    found = masked_entropy_of_logits(logits, targets, masks, temperature=0.7)
    for row, (ids,) in enumerate(sets_of(masks)):
        p = [math.exp(float(logits[row, i]) / 0.7) for i in ids or range(masks.num_choices)]
        assert float(found[row]) == pytest.approx(-sum(x / sum(p) * math.log(x / sum(p)) for x in p), abs=1e-12)


REFUSED = {
    "another token": (lambda h, w, t, m: (h, w, torch.where(t == t[3], 1 - t, t) % 700, m), r"out its.*token"),
    "fewer masks": (lambda h, w, t, m: (h, w, t, m.take(np.arange(5))), "masks of 5 rows"),
    "targets of floats": (lambda h, w, t, m: (h, w, t.double(), m), "torch.float64 targets"),
    "a smaller head": (lambda h, w, t, m: (h, w[:600], t, m), r"head.*600"),
}


@pytest.mark.parametrize("compute", [by_hidden, by_logits])
@pytest.mark.parametrize("broken", REFUSED)
def test_masks_of_other_rows_are_refused(compute, broken):
    change, message = REFUSED[broken]
    with pytest.raises(BatchMismatchError, match=message):
        compute(*change(*problem()))


@pytest.mark.parametrize("compute", [by_hidden, by_logits])
def test_nothing_waits_for_the_device_and_sets_go_there_once(compute, monkeypatch):
    moved, move = [], uploads.joined_to_device
    monkeypatch.setattr(uploads, "joined_to_device", lambda parts, to: moved.append(to) or move(parts, to))
    hidden, head, targets, masks = problem()
    expected = compute(hidden, head, targets, masks)
    expected.sum().backward()
    with other_device() as device:
        there = [each.detach().to(DEVICE).requires_grad_() for each in (hidden, head)]
        tokens, numbers = targets.to(DEVICE), []
        for size in (1 << 24, 300):
            monkeypatch.setattr("foreroute.replay.sampling_masks.BLOCK_NUMBERS", {"cpu": size})
            moved.clear()
            device.reads.clear()
            found = compute(*there, tokens, masks)
            torch.autograd.grad(found.sum(), there, retain_graph=True)
            assert not device.reads
            numbers.append(len(moved))
        found.sum().backward()
        assert torch.allclose(found.values_here, expected, rtol=0, atol=1e-12)
        assert torch.allclose(there[1].grad.values_here, head.grad, rtol=0, atol=1e-12)
        assert numbers[0] == numbers[1] < 12, "each block or part of the head uploads its own"
        tokens[3] = (tokens[3] + 1) % VOCABULARY
        optimizer = torch.optim.SGD(there, lr=0.0)
        compute(*there, tokens, masks)
        tokens.zero_()  # what was given is remembered
        with pytest.raises(BatchMismatchError, match=r"3 leaves.*token"):
            optimizer.step()


def test_products_are_in_float32_under_autocast():
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(2, 32, generator=generator), torch.randn(3000, 32, generator=generator)
    masks = DecisionStream.from_sets(3000, [True, True], [3, 0], [4, 7, 9])  # a gathered row, and one of all logits
    targets = torch.tensor([9, 1])
    expected = masked_logprobs(hidden, head, targets, masks)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(masked_logprobs(hidden, head, targets, masks), expected)


def test_what_cannot_be_computed_is_refused():
    hidden, head, targets, masks = problem()
    with pytest.raises(TraceContentError, match=r"4.*sampling mask"):
        masked_logprobs(hidden, head, targets, masks.without(np.array([4])))
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="expected a number above 0"):
            masked_logprobs(hidden, head, targets, masks, temperature=temperature)
    with pytest.raises(BatchMismatchError, match=r"expected \[R, H\] and \[V, H\]"):
        masked_logprobs(hidden, head[:, :5], targets, masks)
    with pytest.raises(BatchMismatchError, match=r"expected \[R, V\]"):
        masked_logprobs_of_logits(hidden[0], targets, masks)
