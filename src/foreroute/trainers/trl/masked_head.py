"""TRL's fused head on recorded sets: log-probs of sampled tokens where top-p, top-k or min-p left tokens out.

TRL makes log-probs of all tokens in one function, which never shows logits. While `scored_on_sampling_masks` is open,
another one takes its place, which makes those of the sets alone. Entropy stays TRL's, over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from trl.trainer import utils

from foreroute.errors import BatchMismatchError, ConfigError, ReplayError
from foreroute.replay import masked_logprobs
from foreroute.replay.rows import to_device
from foreroute.trace import SAMPLING, DecisionStream, RoutingTrace

HEAD = "_ChunkedLogProbFunction"


def masks_at(
    trace: RoutingTrace, mask_BT: NDArray[np.bool_], sampled_BR: NDArray[np.bool_]
) -> tuple[DecisionStream, NDArray[np.bool_], NDArray[np.bool_]]:
    """Give the masks of a batch at the positions [B · (T - 1)] that predict a token, and two sets of them, bool.

    Args:
        trace: the B sequences, with sampling masks.
        mask_BT: which positions hold their tokens, one behind the other.
        sampled_BR: which tokens of the last R positions were sampled, where they hold any.

    Returns:
        The masks, the positions whose tokens TRL scores, and those of them whose tokens were sampled.
    """
    width = mask_BT.shape[1]
    before = width - sampled_BR.shape[1]
    scored = mask_BT[:, 1:] & (np.arange(1, width) >= before)
    sampled = scored & np.pad(sampled_BR, ((0, 0), (before, 0)))[:, 1:]
    rows = trace.offsets[:-1, None] + np.arange(width - 1) - mask_BT.argmax(axis=1)[:, None]
    masks = trace.streams[SAMPLING].take(np.where(sampled, rows, -1).reshape(-1))
    return masks, scored.reshape(-1), sampled.reshape(-1)


@contextmanager
def scored_on_sampling_masks(
    masks: DecisionStream, scored: NDArray[np.bool_], sampled: NDArray[np.bool_]
) -> Iterator[None]:
    """Have one forward of a model of TRL score its tokens on their sets, and those not sampled as 0, a constant.

    Args:
        masks: at each position [B · (T - 1)].
        scored: bool [B · (T - 1)], the positions that TRL scores.
        sampled: bool [B · (T - 1)], those of them whose tokens were sampled. The others are not in TRL's loss.

    Raises:
        AttributeError: when this release of TRL makes log-probs in another way.
        ReplayError: when no log-probs were made while it was open.
        TraceContentError, BatchMismatchError: as `masked_logprobs`.
        ConfigError: for a head that is not linear.
    """
    calls, original = 0, getattr(utils, HEAD)

    def apply(
        hidden_RH: Tensor,
        head_VH: Tensor,
        bias: Tensor | None,
        targets_R: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Any, ...]:
        nonlocal calls
        calls += 1
        if bias is not None or softcap is not None:
            raise ConfigError(
                "the model's output head has a bias or caps its logits, for which sampling masks are not replayed "
                "under TRL; sample without top_p, top_k and min_p"
            )
        num_scored = int(scored.sum())
        # on GPUs TRL hands over the scored positions alone
        if len(hidden_RH) not in (len(scored), num_scored):
            raise BatchMismatchError(f"TRL scores {len(hidden_RH)} positions; expected {len(scored)} or {num_scored}")
        handed = sampled if len(hidden_RH) == len(scored) else sampled[scored]
        picked = to_device(np.flatnonzero(handed), hidden_RH.device)
        logprobs = masked_logprobs(
            hidden_RH.index_select(0, picked) * scale,
            head_VH,
            targets_R.index_select(0, picked),
            masks.take(np.flatnonzero(sampled)),
            temperature=temperature,
        )
        whole = logprobs.new_zeros(len(hidden_RH)).index_copy(0, picked, logprobs)
        if outputs == ("log_probs",):
            return whole, None, None, None, None
        rest = original.apply(hidden_RH, head_VH, bias, targets_R, temperature, chunk_size, softcap, scale, outputs)
        return whole, *rest[1:]

    with patch.object(utils, HEAD, SimpleNamespace(apply=apply)):
        yield
    if not calls:
        raise ReplayError(
            "TRL made log-probs past its fused head, so that no sampling mask was replayed in them; the releases "
            "before 1.15 always do"
        )
