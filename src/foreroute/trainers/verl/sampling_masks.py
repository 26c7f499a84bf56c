# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""verl's FSDP engine with routing replay that scores on the sampling masks of the rollout, which vLLM brings.

verl imports this module in each of its processes when it is told to, in the place of `foreroute.trainers.verl.fsdp`:

    actor_rollout_ref.model.external_lib=foreroute.trainers.verl.sampling_masks
    +actor_rollout_ref.rollout.engine_kwargs.vllm.return_sampling_mask=True

By the second line vLLM returns masks. In the engine, log-probs of sampled tokens are those on their sets; log-probs of
all other tokens, which no loss takes, are 0.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers", "verl")

import numpy as np
import torch.distributed as dist
import verl
from torch import Tensor
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine.fsdp import transformer_impl

from foreroute.replay import masked_logprobs_of_logits
from foreroute.trainers.checks import require_overridden
from foreroute.trainers.verl.fsdp import RoutingReplayEngine
from foreroute.trainers.verl.registry import replace_engine
from foreroute.trainers.verl.rollout_masks import bring_masks, packed_sets, refuse_unscored, sets_of_rows


class MaskedRoutingReplayEngine(RoutingReplayEngine):
    """verl's FSDP engine with routing replay, whose log-probs are on the sets that tokens were drawn from.

    So are those of references. Entropy stays verl's, over all tokens.
    """

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Run verl's pass over a micro-batch on its sets. Raises `ReplayError` where no logits are scored."""
        counts_N, ids = packed_sets(micro_batch)  # before it is on the device, which would be waited for
        parts = self.ulysses_parallel_group
        calls = 0

        def on_sets(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
            nonlocal calls
            calls += 1
            row_R = np.arange(len(labels)) + (0 if parts is None else dist.get_rank(parts) * len(labels))
            row_R[row_R >= len(counts_N)] = -1
            labels, sets = sets_of_rows(counts_N, ids, row_R, labels, logits.shape[-1])
            return masked_logprobs_of_logits(logits, labels, sets)

        with patch.object(transformer_impl, "logprobs_from_logits", on_sets):
            result = super().forward_step(micro_batch, loss_function, forward_only)
        if not calls and not get_non_tensor_data(micro_batch, "distillation_only", default=False):
            refuse_unscored()
        return result


def register() -> None:
    """Have verl make this engine for fsdp and fsdp2, and its rollouts bring sampling masks."""
    require_overridden("verl", verl.__version__, MaskedRoutingReplayEngine, transformer_impl.FSDPEngineWithLMHead)
    for strategy in ("fsdp", "fsdp2"):
        replace_engine(MaskedRoutingReplayEngine, RoutingReplayEngine, strategy)
    bring_masks()


register()
