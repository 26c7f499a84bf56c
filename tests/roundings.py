"""What roundings alone explain, by an argument: units in the last place, and how many terms are added up."""

import torch

TERMS = 3 * 7 * 48 + 50
"""Of the longest path through a model of `foreroute.testing.models`: in each of 3 layers two norms, the products of
attention and of an expert, none of more than 48 terms, and the softmax over 50 tokens."""
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
