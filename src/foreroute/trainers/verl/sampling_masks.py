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

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers", "verl")

import numpy as np
import torch.distributed as dist
import verl
from verl.workers.engine.fsdp import transformer_impl

from foreroute.trainers.checks import require_overridden
from foreroute.trainers.verl.fsdp import RoutingReplayEngine
from foreroute.trainers.verl.registry import replace_engine
from foreroute.trainers.verl.rollout_masks import bring_masks, scored_on_sets


class MaskedRoutingReplayEngine(RoutingReplayEngine):
    """verl's FSDP engine with routing replay, whose log-probs are on the sets that tokens were drawn from.

    So are those of references. Entropy stays verl's, over all tokens.
    """

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """Run verl's pass over a micro-batch on its sets. Raises `ReplayError` where no logits are scored."""
        group = self.ulysses_parallel_group
        rank = 0 if group is None else dist.get_rank(group)
        # ranks have equal parts of the rows
        rows_of = lambda labels: np.arange(rank * len(labels), (rank + 1) * len(labels))  # noqa: E731
        with scored_on_sets(transformer_impl, "logprobs_from_logits", micro_batch, rows_of):
            return super().forward_step(micro_batch, loss_function, forward_only)


def register() -> None:
    """Have verl make this engine for fsdp and fsdp2, and its rollouts bring sampling masks."""
    require_overridden("verl", verl.__version__, MaskedRoutingReplayEngine, transformer_impl.FSDPEngineWithLMHead)
    for strategy in ("fsdp", "fsdp2"):
        replace_engine(MaskedRoutingReplayEngine, RoutingReplayEngine, strategy)
    bring_masks()


register()
