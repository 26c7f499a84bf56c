"""How the losses of tokens make up the loss of a mini-batch: Σ_t c_t l_t / D."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Mean = Literal["token", "sequence", "constant"]
"""What is averaged over: all tokens alike, sequences of equal weight, or tokens over a constant length."""


def coefficients(lengths_S: Tensor, mean: Mean, max_length: int, dtype: torch.dtype) -> Tensor:
    """[R], c_t: what the loss of each token is multiplied by.

        token       1         D = tokens of the mini-batch       DAPO, arXiv 2503.14476, equation 12
        sequence    1/|y_i|   D = sequences of the mini-batch    GRPO, arXiv 2402.03300, equation 3
        constant    1/L_max   D = sequences of the mini-batch    Dr. GRPO, arXiv 2503.20783, section 3.2

    Args:
        lengths_S: int64 [S], response tokens of each sequence.
        mean: which.
        max_length: L_max, the most tokens that a response may have.
        dtype: of the losses.
    """
    if mean == "sequence":
        return (1 / lengths_S.to(dtype)).repeat_interleave(lengths_S)
    value = 1.0 if mean == "token" else 1 / max_length
    return torch.full((int(lengths_S.sum()),), value, dtype=dtype, device=lengths_S.device)


def denominator(lengths_S: NDArray[np.int64], mean: Mean) -> int:
    """The part of D that these sequences make up."""
    return int(lengths_S.sum()) if mean == "token" else len(lengths_S)
