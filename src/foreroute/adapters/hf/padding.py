"""Padding that a rollout would count as tokens: sequences that were given without a mask, and end in it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn


def warn_of_padding(model: nn.Module, tokens: Sequence[NDArray[np.int64]]) -> None:
    """Warn where sequences of a rollout go on behind their end, as the configurations of the model tell."""
    configs = [getattr(model, name, None) for name in ("generation_config", "config")]
    ends = {end for config in configs for end in _ids(getattr(config, "eos_token_id", None))}
    paddings = [pad for config in configs for pad in _ids(getattr(config, "pad_token_id", None))]
    # without padding of their own, `generate` goes on with the end token, of which the first is no padding
    known = set(paddings[:1]) or ends
    if any(len(each) > 1 and each[-1] == each[-2] and int(each[-1]) in known for each in tokens):
        warnings.warn(
            f"sequences of the rollout end in several tokens {' or '.join(map(str, sorted(known)))}, the padding of "
            "this model, which are kept as tokens with routes; give an attention_mask that is 0 there",
            stacklevel=3,
        )


def _ids(given: object) -> list[int]:
    """Give the tokens that a configuration names: none, one or a list."""
    ids = given if isinstance(given, list | tuple) else [given]
    return [each for each in ids if isinstance(each, int)]
