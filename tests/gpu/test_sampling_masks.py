"""Log-probs on recorded sets, of a bfloat16 head and hidden states: on a GPU they go through tensor cores."""

import pytest
import torch

from foreroute.replay import masked_logprobs
from tests.replay.test_sampling_masks import dense, problem

pytestmark = pytest.mark.gpu
ROUNDING = 2.0**-9
"""Of one number in bfloat16."""


def test_sums_are_in_float32_and_gradients_are_rounded_once_before_and_once_after(device):
    hidden, head, targets, masks = problem(num_rows=64, dtype=torch.bfloat16)
    there = [each.detach().to(device).requires_grad_() for each in (hidden, head)]
    found = masked_logprobs(*there, targets.to(device), masks)
    wide = [each.detach().double() for each in (hidden, head)]
    logits = (wide[0] @ wide[1].T).requires_grad_()
    exact = dense(logits, targets, masks, 1.0)
    assert torch.allclose(found.cpu().double(), exact, rtol=1e-6, atol=2e-6 * float(exact.detach().abs().max()))
    (slopes,) = torch.autograd.grad(exact.sum(), logits)
    got = torch.autograd.grad(found.sum(), there)
    for one, left, right in zip(got, (slopes, slopes.T), (wide[1], wide[0]), strict=True):
        # a slope is rounded before the product, a gradient after it
        bound = 2.1 * ROUNDING * (left.abs() @ right.abs()) + 1e-6
        assert ((one.cpu().double() - left @ right).abs() <= bound).all()
