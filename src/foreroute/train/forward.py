"""The trainer's forward pass over a micro-batch of whole sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.capture import Generation
from foreroute.train.task import PAD_TOKEN


def response_logprobs(model: Any, generation: Generation, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of each sampled token, and the entropy of the distribution it was sampled from.

    Args:
        model: a causal language model.
        generation: the sequences of one micro-batch; they are padded on the right.
        temperature: of the rollout.

    Returns:
        Two float32 tensors [R], response tokens packed sequence after sequence; entropy is in nats, without gradient.
    """
    input_ids_BT, mask_BT, is_response_BT = pad(generation)
    logits = model(
        input_ids=torch.from_numpy(input_ids_BT), attention_mask=torch.from_numpy(mask_BT), use_cache=False
    ).logits
    # the logits at position p are those of token p + 1
    chosen = torch.from_numpy(is_response_BT[:, 1:])
    logprobs_RV = (logits[:, :-1][chosen].float() / temperature).log_softmax(-1)
    targets_R = torch.from_numpy(input_ids_BT)[:, 1:][chosen]
    entropy_R = -(logprobs_RV.detach().exp() * logprobs_RV.detach()).sum(-1)
    return logprobs_RV.gather(-1, targets_R[:, None])[:, 0], entropy_R


def pad(generation: Generation) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Tokens and mask [B, T], padded on the right, and which of them are response tokens."""
    trace = generation.trace
    lengths = trace.lengths
    position_T = np.arange(int(lengths.max()))
    mask_BT = position_T < lengths[:, None]
    input_ids_BT = np.full(mask_BT.shape, PAD_TOKEN, np.int64)
    input_ids_BT[mask_BT] = trace.token_ids_N
    return input_ids_BT, mask_BT.astype(np.int64), mask_BT & (position_T >= generation.prompt_lengths[:, None])
