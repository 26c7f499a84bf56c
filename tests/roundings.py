"""What roundings alone explain, by an argument: units in the last place, and how many terms are added up."""

import math

import torch


def terms_of(width, vocabulary=50):
    """The longest path through a model of three layers, none of whose sums has more than `width` terms.

    In each layer two norms, the router, two products of an expert, and of attention two products and what heads add up,
    which have together no more than that; behind them the last norm, the head, and the softmax over the vocabulary.
    """
    return (3 * 8 + 2) * width + vocabulary


def gradient_terms_of(width):
    """A gradient goes forth to the loss, and back by as many products, of activations that are as far off again."""
    return 3 * terms_of(width)


TERMS, GRADIENT_TERMS = terms_of(48), gradient_terms_of(48)
"""What models of `foreroute.testing.models` add up, at their own sizes."""
SURE = 8
"""Standard deviations: a number is further off with a probability of 2 exp(-SURE² / 2), 3e-14."""


def roundings(terms, dtype=torch.float32):
    """The relative difference between two computations of one number that add up so many terms, in whatever orders.

    Each is off by at most SURE √n u of the sum of the magnitudes, with u = eps / 2: roundings go either way (Higham and
    Mary, A new approach to probabilistic rounding error analysis, 2019, theorem 2.4).
    """
    return SURE * terms**0.5 * torch.finfo(dtype).eps


def require_rounded(seen, expected, terms=TERMS):
    """Equal but for `roundings`, of the largest magnitude of the tensor."""
    atol = roundings(terms, seen.dtype) * float(expected.detach().abs().max())
    torch.testing.assert_close(seen, expected, rtol=0, atol=atol, check_dtype=False)


def most_k3(model, terms):
    """The k3 between two computations of the log-probs of one model, at most.

    A logit is no more than the length of a row of the last norm, times that of a row of the head. A log-prob is off by
    its own logit's roundings and by those of the sum over all.
    """
    head, scale = model.lm_head.weight.detach(), model.model.norm.weight.detach()
    log_r = 2 * roundings(terms) * head.shape[1] ** 0.5 * float((head * scale).norm(dim=1).max())
    return math.expm1(log_r) - log_r
