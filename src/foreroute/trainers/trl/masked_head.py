"""TRL's fused head on recorded sets: log-probs of sampled tokens where top-p, top-k or min-p left tokens out.

TRL makes log-probs of all tokens in one function, which never shows logits. While `scored_on_sampling_masks` is open,
another one takes its place, which makes those of the sets alone. Entropy stays TRL's, over all tokens.

Letters: `B` sequences, `T` positions of the padded batch, `R` of its responses, `C` tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
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


class ScoringMasks(NamedTuple):
    """The sets of the sampled tokens of a batch, and where TRL's head meets the states that predict them."""

    masks: DecisionStream  # of the C tokens
    rows_C: dict[int, NDArray[np.int64]]  # among so many states as the head is given: of all positions, or of scored

    @classmethod
    def of(cls, trace: RoutingTrace, mask_BT: NDArray[np.bool_], sampled_BR: NDArray[np.bool_]) -> ScoringMasks:
        """Find them, given where tokens of B sequences are, and which in the last R positions were sampled."""
        width = mask_BT.shape[1]
        before = width - sampled_BR.shape[1]
        # the state of a position predicts the token of the next one
        scored = mask_BT[:, 1:] & (np.arange(1, width) >= before)
        sampled = scored & np.pad(sampled_BR, ((0, 0), (before, 0)))[:, 1:]
        rows = (trace.offsets[:-1, None] + np.arange(width - 1) - mask_BT.argmax(axis=1)[:, None])[sampled]
        at_all, at_scored = np.flatnonzero(sampled), np.flatnonzero(sampled[scored])
        return cls(trace.streams[SAMPLING].take(rows), {int(scored.sum()): at_scored, scored.size: at_all})


@contextmanager
def scored_on_sampling_masks(of_forwards: Sequence[ScoringMasks]) -> Iterator[None]:
    """Have forwards of a model of TRL score their tokens on their sets, and those not sampled as 0, a constant.

    Raises as `masked_logprobs`, and `ReplayError` unless each forward made log-probs once while it was open.
    """
    calls, original = 0, getattr(utils, HEAD)

    def apply(hidden_RH: Tensor, head_VH: Tensor, bias: Tensor | None, *options: Any) -> tuple[Any, ...]:
        nonlocal calls
        calls += 1
        if calls > len(of_forwards):
            raise ReplayError(
                f"TRL made log-probs of more than the {len(of_forwards)} forwards that have sampling masks"
            )
        scoring = of_forwards[calls - 1]
        targets_R, temperature, _chunk_size, softcap, scale, outputs = options
        if bias is not None or softcap is not None:
            raise ConfigError(
                "the model's output head has a bias or caps its logits, for which sampling masks are not replayed "
                "under TRL; sample without top_p, top_k and min_p"
            )
        # on GPUs TRL hands over the scored positions alone
        if len(hidden_RH) not in scoring.rows_C:
            expected = " or ".join(map(str, reversed(scoring.rows_C)))
            raise BatchMismatchError(f"TRL scores {len(hidden_RH)} positions; expected {expected}")
        picked = to_device(scoring.rows_C[len(hidden_RH)], hidden_RH.device)
        hidden_CH, targets_C = hidden_RH.index_select(0, picked) * scale, targets_R.index_select(0, picked)
        logprobs = masked_logprobs(hidden_CH, head_VH, targets_C, scoring.masks, temperature=temperature)
        whole = logprobs.new_zeros(len(hidden_RH)).index_copy(0, picked, logprobs)
        if outputs == ("log_probs",):
            return whole, None, None, None, None
        return whole, *original.apply(hidden_RH, head_VH, bias, *options)[1:]

    with patch.object(utils, HEAD, SimpleNamespace(apply=apply)):
        yield
    if calls < len(of_forwards):
        raise ReplayError(
            "TRL made log-probs past its fused head, so that no sampling mask was replayed in them; the releases "
            "before 1.15 always do"
        )
