"""An attention that runs on the CPU what Megatron leaves to Transformer Engine, put in through layer specs.

Packed sequences and context parallelism need one that Megatron has for GPUs alone. It neither routes nor dispatches
anything, so Megatron's routers, dispatchers and schedules run as they are.
"""

import math

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence, written down: a mask over the keys of all context ranks.

    Stands where TEDotProductAttention does.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, pg_collection=None, **kwargs):
        super().__init__(config=config)
        self.cp_group = pg_collection.cp

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **kwargs):
        is_packed = query.dim() == 3
        if is_packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if self.cp_group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (key, value))
        shared = query.size(2) // key.size(2)
        key, value = (x.repeat_interleave(shared, dim=2) for x in (key, value))
        seen_QK = self._seen(query.size(0), packed_seq_params)
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / math.sqrt(query.size(-1))
        weights = scores.masked_fill(~seen_QK.to(scores.device), -10000.0).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)

    def _seen(self, num_router_rows, packed):
        """bool [this rank's slots, the slots of all context ranks]: which key a query sees."""
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        ends = packed and (packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded)
        lengths = ends.diff().tolist() if packed else [num_router_rows * ranks]
        by_rank = [torch.tensor(zigzag(lengths, ranks, r)) for r in range(ranks)]
        sequence_Q, position_Q = by_rank[rank].T
        sequence_K, position_K = torch.cat(by_rank).T
        return (sequence_Q[:, None] == sequence_K) & (position_Q[:, None] >= position_K)


def zigzag(lengths, ranks, rank):
    """(sequence, position) of every slot of one context rank: chunks `rank` and `2 * ranks - 1 - rank` of each."""
    parts, mine = (2 * ranks, (rank, 2 * ranks - 1 - rank)) if ranks > 1 else (1, (0,))
    slots = []
    for sequence, length in enumerate(lengths):
        chunk = length // parts
        assert chunk * parts == length
        slots += [(sequence, position) for c in mine for position in range(c * chunk, (c + 1) * chunk)]
    return slots
