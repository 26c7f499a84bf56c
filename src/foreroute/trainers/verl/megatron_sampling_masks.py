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
from typing import Any
from unittest.mock import patch

from foreroute.adapters.versions import require_peers

require_peers("torch", "megatron-core", "verl")

import numpy as np
import verl
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray
from torch import Tensor
from verl.utils.megatron_utils import unwrap_model
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine.megatron import transformer_impl
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from foreroute.layout import pack, pad
from foreroute.replay import masked_logprobs_of_logits
from foreroute.trainers.checks import require_overridden
from foreroute.trainers.verl.megatron import DEVICE, MegatronRoutingReplay, round_up_to_ranks
from foreroute.trainers.verl.registry import replace_engine
from foreroute.trainers.verl.rollout_masks import bring_masks, packed_sets, refuse_unscored, sets_of_rows


class MaskedMegatronRoutingReplay(MegatronRoutingReplay):
    """verl's Megatron engine with routing replay, whose log-probs are on the sets that tokens were drawn from.

    So are those of references. Entropy stays verl's, over all tokens.
    """

    def forward_step(self, batch_iter: Iterator[Any], model: Any, **functions: Any) -> Any:
        """Run verl's pass over a micro-batch on its sets. Raises `ReplayError` where no logits are scored."""
        if not unwrap_model(model).post_process:
            return super().forward_step(batch_iter, model, **functions)
        data = next(batch_iter)
        counts_N, ids = packed_sets(data)  # before it is on the device, which would be waited for
        lengths_S = data["input_ids"].offsets().diff().cpu().numpy()
        is_packed, group = self.engine_config.use_remove_padding, mpu.get_tensor_model_parallel_group()
        calls = 0

        def on_sets(logits: Tensor, labels: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            row_R = _rows_here(lengths_S, labels.shape, is_packed=is_packed)
            labels_R, sets = sets_of_rows(counts_N, ids, row_R, labels.reshape(-1), logits.shape[-1] * group.size())
            logits_RV = logits.reshape(-1, logits.shape[-1])
            return masked_logprobs_of_logits(logits_RV, labels_R, sets, vocabulary_group=group).view(labels.shape)

        with patch.object(transformer_impl, "vocab_parallel_log_probs_from_logits", on_sets):
            result = super().forward_step(iter([data]), model, **functions)
        if not calls and not get_non_tensor_data(data, "distillation_only", default=False):
            refuse_unscored()
        return result


def _rows_here(lengths_S: NDArray[np.int64], shape: tuple[int, ...], *, is_packed: bool) -> NDArray[np.integer]:
    """Find the row of the batch without padding at each place that this rank has labels [B, T] for, -1 for padding."""
    num_ranks, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    batch, width = shape[0], shape[1] * num_ranks
    if is_packed:
        padded_S = round_up_to_ranks(lengths_S)
        padded_S[-1] += width - padded_S.sum()  # what fills up the whole goes to the last sequence
        layout = pack(lengths_S, padded_lengths=padded_S)
    else:
        layout = pad(lengths_S, side="right", order="sbhd", to=width)
    rows: NDArray[np.integer] = layout.split_context(num_ranks, rank).rows().packed_row_R
    return rows.reshape(-1, batch).T.reshape(-1)


def register() -> None:
    """Have verl make this engine for the strategy megatron, and its rollouts bring sampling masks."""
    require_overridden("verl", verl.__version__, MaskedMegatronRoutingReplay, MegatronEngineWithLMHead)
    replace_engine(MaskedMegatronRoutingReplay, MegatronRoutingReplay, "megatron", device=DEVICE)
    bring_masks()


register()
