"""The rollout that a trainer works on, and what a forward over some of its sequences takes.

A pass of TRL over a batch is one forward, or one for each slice of it. Routes and masks of a forward are made once for
all passes over the same sequences.

Letters: `S` sequences of a rollout, `B` of a forward, `T` positions of TRL's padded batch, `R` of its responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import ReplayError
from foreroute.replay.rows import to_device
from foreroute.trace import SAMPLING, RoutingTrace
from foreroute.trainers.trl.masked_head import ScoringMasks

if TYPE_CHECKING:
    from foreroute.adapters.hf.trace_rows import TraceRows

ROWS = "foreroute_rows"
"""In TRL's batches: int64 [B, 2] on the host, the number of the rollout and that of the sequence in it."""
LOGPROBS = "foreroute_logprobs"
"""In TRL's batches, where TRL keeps none: float32 [B, R], what tokens were sampled with, NaN where not known."""
LOGPROBS_OF_TRL = "sampling_per_token_logps"


class Decisions(NamedTuple):
    """Parts of the rollout that every forward over the same sequences takes."""

    sequences: NDArray[np.int64]  # [B], of the rollout
    routes: TraceRows
    masks: ScoringMasks | None  # None where no token of the vocabulary was left out in sampling


@dataclass(eq=False)
class Rollout:
    """Result of one call of TRL's generation, in its order."""

    trace: RoutingTrace  # S sequences, prompt and completion
    prompt_lengths: NDArray[np.int64]  # [S]
    logprobs: Sequence[NDArray[np.float32]] | None = None  # S of [R], as the source saw them; NaN where not known
    env_masks: Sequence[Sequence[int]] | None = None  # S of [R], 0 for what was not sampled; None where all was
    # of the trainer that works on it
    number: int = 0  # counts its rollouts
    make_rows: Callable[[RoutingTrace], TraceRows] = field(init=False)
    drops_truncated: bool = False  # whether TRL masks truncated completions
    mask_ST: NDArray[np.bool_] | None = None  # TRL's attention mask, once it has padded the rollout
    num_scored: int = 0  # R, the last positions of the padded batch, of which some hold responses
    _decisions: dict[tuple[int, ...], Decisions] = field(default_factory=dict)

    def read_mask(self, mask_ST: Tensor, num_scored: int) -> None:
        """Read TRL's mask of the whole rollout. The host waits, once for each rollout and before its first forward."""
        if self.mask_ST is None:
            self.mask_ST, self.num_scored = mask_ST.bool().cpu().numpy(), num_scored

    def columns(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Give what TRL is to shuffle and split with its batch of the whole rollout."""
        # numbers stay on the host, so that nobody waits for a device to know which sequences a micro-batch has
        columns = {ROWS: torch.tensor([[self.number, s] for s in range(len(self.trace))], dtype=torch.int64)}
        if self.logprobs is not None and batch.get(LOGPROBS_OF_TRL) is None:
            padded_SR = np.full(batch["completion_ids"].shape, np.nan, np.float32)
            for row, own in zip(padded_SR, self.logprobs, strict=True):
                row[: len(own)] = own
            columns[LOGPROBS] = to_device(padded_SR, batch["completion_ids"].device)
        return columns

    def sequences_of(self, batch: Mapping[str, Any]) -> NDArray[np.int64]:
        """Give the sequences of a micro-batch, int64 [B]. Raises `ReplayError` when they are of another rollout."""
        if ROWS not in batch:
            raise ReplayError(f"the micro-batch has no {ROWS!r}: TRL dropped what its generation batch held")
        numbers_B2 = batch[ROWS].cpu().numpy()
        if (numbers_B2[:, 0] != self.number).any():
            raise ReplayError(
                f"the micro-batch is of the rollouts {sorted(set(numbers_B2[:, 0].tolist()))}, and the routes at hand "
                f"are those of rollout {self.number}"
            )
        return np.asarray(numbers_B2[:, 1])

    def decisions(self, sequences: NDArray[np.int64]) -> Decisions:
        """Give what forwards over these sequences take, made at the first of them."""
        key = tuple(sequences.tolist())
        if key not in self._decisions:
            assert self.mask_ST is not None, "it is read before the first forward"
            mask_BT, trace = self.mask_ST[sequences], self.trace.select(sequences)
            masks = None
            if SAMPLING in trace.streams:
                masks = ScoringMasks.of(trace, mask_BT, self._sampled(sequences))
            length_B, prompts = mask_BT.sum(1), self.prompt_lengths[sequences]
            # where TRL masks truncated completions, the prompt alone is left of such
            is_masked = self.drops_truncated & (length_B == prompts) & (length_B < trace.lengths)
            routes = trace.truncated(np.where(is_masked, prompts, trace.lengths))
            self._decisions[key] = Decisions(sequences, self.make_rows(routes), masks)
        return self._decisions[key]

    def _sampled(self, sequences: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which tokens of the responses were sampled, bool [B, R], padded on the right."""
        if self.env_masks is None:
            return np.ones((len(sequences), self.num_scored), np.bool_)
        sampled_BR = np.zeros((len(sequences), self.num_scored), np.bool_)
        for row, s in enumerate(sequences):
            sampled_BR[row, : len(self.env_masks[s])] = self.env_masks[s]
        return sampled_BR
