"""What a forward call of a Hugging Face model says about its batch."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import BatchMismatchError


@dataclass(frozen=True)
class Batch:
    """Tokens of one forward.

    Attributes:
        input_ids_BT: int64 [B, T].
        mask_BT: bool [B, T], False where padded, or None when nothing is.
        past: how many positions the key-value cache already held.
        device: where the tokens are.
    """

    input_ids_BT: NDArray[np.int64]
    mask_BT: NDArray[np.bool_] | None
    past: int
    device: torch.device

    @classmethod
    def of_call(cls, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """Read the batch off the arguments of a call. Copies token ids to the host, once per forward.

        Raises:
            BatchMismatchError: when the call passes embeddings instead of tokens, or a mask that is not 2-D.
        """
        given = signature.bind_partial(*args, **kwargs).arguments
        given |= given.get("kwargs", {})
        input_ids = given.get("input_ids")
        if not isinstance(input_ids, Tensor):
            raise BatchMismatchError(
                "the forward got no input_ids; pass tokens, so that routes and batch can be checked to belong together"
            )
        tokens = input_ids.detach().cpu().numpy().astype(np.int64, copy=False)
        cache = given.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        return cls(tokens, _mask(given.get("attention_mask"), tokens.shape), past, input_ids.device)


def _mask(mask: Any, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != shape[0] or mask.shape[1] < shape[1]:
        seen = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise BatchMismatchError(f"attention_mask is {seen}; expected [batch, tokens], 1 for tokens and 0 for padding")
    kept = mask.detach()[:, mask.shape[1] - shape[1] :].cpu().numpy().astype(np.bool_)
    return None if kept.all() else kept
