"""What the indexers of a deepseek_v32 hand on in its forwards: a probe, and the same of a trace.

Rows are told apart by the tokens up to them, so that the order of sequences, padding and micro-batches do not matter.
"""

from collections import defaultdict
from contextlib import contextmanager

import torch

from foreroute.testing.models import FAMILIES
from tests.traces import sets_of

SIZES = FAMILIES["deepseek_v3"] | {
    "vocab_size": 64, "max_position_embeddings": 128, "n_routed_experts": 16, "num_local_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "index_topk": 3, "index_head_dim": 16, "index_n_heads": 8,
}  # fmt: skip


@contextmanager
def attended(model):
    """Yields, for each (tokens up to a row, layer), the sets of positions that were handed on, filled up meanwhile."""
    seen, now, handles = defaultdict(set), {}, []

    def begin(_, args, given):
        now["ids"], now["mask"] = given["input_ids"], given.get("attention_mask")

    def note(layer):
        def hook(_, __, keys):
            mask = torch.ones_like(now["ids"]) if now["mask"] is None else now["mask"]
            for ids_T, mask_T, keys_TK in zip(now["ids"], mask.bool(), keys, strict=True):
                first, tokens = int(mask_T.int().argmax()), ids_T[mask_T].tolist()
                for p in range(len(tokens)):
                    positions = {int(key) - first for key in keys_TK[first + p]}
                    seen[tuple(tokens[: p + 1]), layer].add(frozenset(positions & set(range(p + 1))))

        return hook

    handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))
    indexers = [module for module in model.modules() if type(module).__name__ == "DeepseekV32Indexer"]
    handles += [module.register_forward_hook(note(layer)) for layer, module in enumerate(indexers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def chosen(trace):
    """The same of a trace, without rows that have no choice."""
    of_rows, sets = sets_of(trace.streams["indexer"]), defaultdict(set)
    for s in range(len(trace)):
        tokens = trace.tokens(s).tolist()
        for p, by_layer in enumerate(of_rows[trace.offsets[s] : trace.offsets[s + 1]]):
            for layer, ids in enumerate(by_layer or ()):
                sets[tuple(tokens[: p + 1]), layer].add(frozenset(ids or range(p + 1)))
    return sets


def followed(seen, wanted):
    """How many of the rows and layers that were seen chose otherwise than wanted, and how many were seen at all."""
    rows = [key for key in seen if key in wanted]
    return sum(not seen[key] <= wanted[key] for key in rows), len(rows)
