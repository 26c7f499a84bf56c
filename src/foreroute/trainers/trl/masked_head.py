"""TRL's fused head on recorded sets: log-probs of sampled tokens where top-p, top-k or min-p left tokens out.

TRL makes log-probs of all tokens in one function, which never shows logits. While `head_on_sets` is open, another one
takes its place, which makes those of the sets alone. Entropy stays TRL's, over all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import trl
from numpy.typing import NDArray
from torch import Tensor
from trl.trainer import utils

from foreroute.errors import AttachError, BatchMismatchError, ConfigError, ReplayError
from foreroute.replay import masked_logprobs, to_device
from foreroute.trace import SAMPLING, DecisionStream, RoutingTrace

HEAD = "_ChunkedLogProbFunction"


def require_head() -> None:
    """Raise `AttachError` when this release of TRL makes log-probs in another way."""
    if not hasattr(getattr(utils, HEAD, None), "apply"):
        raise AttachError(
            f"TRL {trl.__version__} has no trl.trainer.utils.{HEAD}, in whose place sampling masks are replayed; "
            "sample without top_p, top_k and min_p, or install the TRL that this foreroute was tested with"
        )


def masks_at(
    trace: RoutingTrace, mask_BT: NDArray[np.bool_], num_scored: int
) -> tuple[DecisionStream, NDArray[np.bool_]]:
    """Give the masks of a batch at the positions [B · (T - 1)] that predict a token, and those that TRL scores, bool.

    Args:
        trace: the B sequences, with sampling masks.
        mask_BT: which positions hold their tokens, one behind the other.
        num_scored: the last positions, of whose tokens TRL scores those in the mask.
    """
    width = mask_BT.shape[1]
    scored = mask_BT[:, 1:] & (np.arange(1, width) >= width - num_scored)
    rows = trace.offsets[:-1, None] + np.arange(width - 1) - mask_BT.argmax(axis=1)[:, None]
    return trace.streams[SAMPLING].take(np.where(scored, rows, -1).reshape(-1)), scored.reshape(-1)


@contextmanager
def head_on_sets(masks: DecisionStream, scored: NDArray[np.bool_]) -> Iterator[None]:
    """Have one forward of a model of TRL score its tokens on their sets.

    Args:
        masks: at each position [B · (T - 1)].
        scored: bool [B · (T - 1)], the positions that TRL scores.

    Raises:
        ReplayError: when no log-probs were made while it was open.
        TraceContentError, BatchMismatchError: as `masked_logprobs`.
        ConfigError: for a head that is not linear.
    """
    original, calls = getattr(utils, HEAD), 0

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
        rows = np.flatnonzero(scored)
        # on GPUs TRL hands over the scored positions alone
        if len(hidden_RH) not in (len(scored), len(rows)):
            raise BatchMismatchError(f"TRL scores {len(hidden_RH)} positions; expected {len(scored)} or {len(rows)}")
        picked = to_device(rows if len(hidden_RH) == len(scored) else np.arange(len(rows)), hidden_RH.device)
        logprobs = masked_logprobs(
            hidden_RH.index_select(0, picked) * scale,
            head_VH,
            targets_R.index_select(0, picked),
            masks.take(rows),
            temperature=temperature,
        )
        whole = logprobs.new_zeros(len(hidden_RH)).index_copy(0, picked, logprobs)
        if outputs == ("log_probs",):
            return whole, None, None, None, None
        rest = original.apply(hidden_RH, head_VH, bias, targets_R, temperature, chunk_size, softcap, scale, outputs)
        return whole, *rest[1:]

    setattr(utils, HEAD, SimpleNamespace(apply=apply))
    try:
        yield
    finally:
        setattr(utils, HEAD, original)
    if not calls:
        raise ReplayError("TRL made log-probs past its fused head, so that no sampling mask was replayed in them")
