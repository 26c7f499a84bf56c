# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""verl's Megatron engine with routing replay that scores on the sampling masks of the rollout, which vLLM brings.

In the place of `foreroute.trainers.verl.megatron`:

    actor_rollout_ref.model.external_lib=foreroute.trainers.verl.megatron_sampling_masks
    +actor_rollout_ref.rollout.engine_kwargs.vllm.return_sampling_mask=True

As in `foreroute.trainers.verl.sampling_masks`, with the vocabulary cut over tensor-parallel ranks and rows over those
of context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from foreroute.adapters.versions import require_peers

require_peers("torch", "megatron-core", "verl")

import numpy as np
import verl
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray
from torch import Tensor
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from foreroute.trainers.checks import require_overridden
from foreroute.trainers.verl.megatron import DEVICE, MegatronRoutingReplay, lay_out
from foreroute.trainers.verl.registry import replace_engine
from foreroute.trainers.verl.rollout_masks import bring_masks, scored_on_sets


class MaskedMegatronRoutingReplay(MegatronRoutingReplay):
    """verl's Megatron engine with routing replay, whose log-probs are on the sets that tokens were drawn from.

    So are those of references. Entropy stays verl's, over all tokens.
    """

    def forward_step(self, batch_iter: Iterator[Any], model: Any, **functions: Any) -> Any:
        """Run verl's pass over a micro-batch on its sets. Raises `ReplayError` where no logits are scored."""
        if not unwrap_model(model).post_process:
            return super().forward_step(batch_iter, model, **functions)
        data = next(batch_iter)
        lengths_S = data["input_ids"].offsets().diff().cpu().numpy()
        rows_of = partial(_rows_here, lengths_S, is_packed=self.engine_config.use_remove_padding)
        name, group = "vocab_parallel_log_probs_from_logits", mpu.get_tensor_model_parallel_group()
        with scored_on_sets(transformer_impl, name, data, rows_of, group):
            return super().forward_step(iter([data]), model, **functions)


def _rows_here(lengths_S: NDArray[np.int64], labels_BT: Tensor, *, is_packed: bool) -> NDArray[np.integer]:
    """Find the row of the batch without padding at each place that this rank has a label for, -1 for padding."""
    num_ranks, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    layout = lay_out(lengths_S, labels_BT.shape[1] * num_ranks, is_packed=is_packed)
    rows: NDArray[np.integer] = layout.split_context(num_ranks, rank).rows().packed_row_R
    return rows.reshape(-1, len(labels_BT)).T.reshape(-1)


def register() -> None:
    """Have verl make this engine for the strategy megatron, and its rollouts bring sampling masks."""
    require_overridden("verl", verl.__version__, MaskedMegatronRoutingReplay, MegatronEngineWithLMHead)
    replace_engine(MaskedMegatronRoutingReplay, MegatronRoutingReplay, "megatron", device=DEVICE)
    bring_masks()


register()
