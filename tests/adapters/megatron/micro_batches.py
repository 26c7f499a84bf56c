"""Micro-batches of a cell, their cut for one rank, the rows of the trace that its routers should see, and traces."""

import dataclasses
import itertools
from inspect import signature

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.utils import get_batch_on_this_cp_rank

from foreroute import RoutedLayer, RoutingSpec, RoutingTrace, layout
from tests.adapters.megatron.cpu_modules import zigzag
from tests.adapters.megatron.model_chunks import EXPERTS, TOP_K, VOCABULARY

WIDTH = 16
PADDED = ((16, 9), (5, 12), (16, 16), (11, 3))
PACKED = ((10, 7, 3), (16, 2), (5, 9, 8), (4, 4))
PACKED_ALIKE = ((10, 7, 3), (3, 10, 7), (7, 3, 10), (10, 3, 7))
PAD_ROW = -1
# newer versions ask whether sequences have context groups of their own
PLAIN = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}


@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank."""

    lengths: tuple  # of each sequence, without padding
    tokens: tuple  # one integer tensor per sequence
    packed: bool
    align: int  # packed sequences are padded to a multiple of this
    width: int = WIDTH  # slots of a padded sequence
    routes: object = None  # what it is replayed on

    def laid_out(self, values, fill):
        """One number per token of each sequence, in the order of the whole batch: [B, width], or [1, total] packed."""
        if not self.packed:
            return torch.stack([_padded(v, self.width, fill) for v in values])
        return torch.cat([_padded(v, n, fill) for v, n in zip(values, self.slots, strict=True)])[None]

    @property
    def num_router_rows(self):
        """Slots of a stream, over all its context ranks: T of a padded batch, the whole of a packed one."""
        return sum(self.slots) if self.packed else self.width

    @property
    def slots(self):
        """Slots of each packed sequence."""
        return tuple(-(-n // self.align) * self.align for n in self.lengths)

    @property
    def rows(self):
        """Rows of a trace of these sequences, in the order of the whole batch; -1 in padding."""
        ends = np.cumsum((0, *self.lengths))
        return self.laid_out([torch.arange(a, b) for a, b in itertools.pairwise(ends)], PAD_ROW)


def layout_of(batch):
    """Where its rows are, before ranks share it."""
    if batch.packed:
        return layout.pack(np.array(batch.lengths), align=batch.align)
    return layout.pad(np.array(batch.lengths), side="right", order="sbhd", to=batch.width)


def make_batches(cell, seed=0):
    """Two micro-batches, other ones on every data-parallel rank; three for stages, four for virtual ones: even."""
    generator = torch.Generator().manual_seed(1000 * seed + parallel_state.get_data_parallel_rank())
    default = PADDED if not cell.packed else PACKED_ALIKE if cell.same_shapes else PACKED
    align = 2 * cell.cp * cell.tp if cell.cp * cell.tp > 1 else 1
    return [
        Batch(each, tuple(torch.randint(0, VOCABULARY, (n,), generator=generator) for n in each), cell.packed, align)
        for each in default[: 4 if cell.vpp > 1 else 1 + cell.pp]
    ]


def cut(batch, values):
    """One tensor of the whole batch as this context rank gets it, by Megatron's own function where it has one."""
    context = parallel_state.get_context_parallel_group()
    if not batch.packed:
        return get_batch_on_this_cp_rank({"values": values}, cp_group=context, **PLAIN)["values"]
    starts = np.cumsum((0, *batch.slots))
    return values[:, [int(starts[s]) + p for s, p in zigzag(batch.slots, context.size(), context.rank())]]


def expected_rows(batch):
    """The trace row that each router row of this rank sees, [R]: rows sent the way that hidden states go."""
    rows = cut(batch, batch.rows).T.contiguous()
    return scatter_to_sequence_parallel_region(rows).reshape(-1).numpy()


def model_inputs(batch):
    """What GPTModel is called with on this rank, and the weight of each of its losses."""
    tokens = batch.laid_out(batch.tokens, 0)
    positions = batch.laid_out([torch.arange(n) for n in batch.lengths], 0)
    weights = batch.laid_out([torch.linspace(0.5, 1.5, n) for n in batch.lengths], 0.0)
    inputs = {
        "input_ids": cut(batch, tokens),
        "position_ids": cut(batch, positions),
        "labels": cut(batch, tokens.roll(-1, 1)),
        "attention_mask": None if batch.packed else torch.ones(batch.width, batch.width).triu(1).bool()[None, None],
        "packed_seq_params": _packed(batch) if batch.packed else None,
    }
    return inputs, cut(batch, weights)


def _packed(batch):
    real, padded = (
        torch.tensor(np.cumsum((0, *lengths)), dtype=torch.int32) for lengths in (batch.lengths, batch.slots)
    )
    longest = max(batch.slots)
    return PackedSeqParams("thd", real, real, padded, padded, longest, longest)


def _padded(values, width, fill):
    return torch.cat([values, torch.full((width - len(values),), fill, dtype=values.dtype)])


def made_up(batch, cell, *seed, favour_LE=0.0, complete=False):
    """Routes that no router chose, for every row but each sequence's last, which an engine never computes."""
    layers, top_k = cell.routed_layers, cell.settings.get("moe_router_topk", TOP_K)
    rng = np.random.default_rng((*seed, parallel_state.get_data_parallel_rank()))
    scores = [rng.gumbel(size=(n - 1 + complete, len(layers), EXPERTS)) + favour_LE for n in batch.lengths]
    routes = [np.argsort(-each, axis=-1)[..., :top_k] for each in scores]
    spec = RoutingSpec(EXPERTS, top_k, tuple(map(RoutedLayer, layers)))
    return RoutingTrace.from_sequences(spec, [t.numpy() for t in batch.tokens], routes)


def split(trace, batches):
    """The trace of each micro-batch; of a padded one, rows of padding were recorded as well."""
    ends = np.cumsum([len(batch.lengths) for batch in batches])
    parts = [trace.select(np.arange(end - len(batch.lengths), end)) for end, batch in zip(ends, batches, strict=True)]
    return [part.truncated(np.array(batch.lengths)) for part, batch in zip(parts, batches, strict=True)]


def shifted(trace):
    """The same routes one row late in every sequence, as if prompts had a token more."""
    ids_NLK = trace.expert_ids_NLK.copy()
    for a, b in itertools.pairwise(trace.offsets):
        routed = np.arange(a, b)[trace.valid_N[a:b]]
        ids_NLK[routed] = np.roll(ids_NLK[routed], 1, axis=0)
    return dataclasses.replace(trace, expert_ids_NLK=ids_NLK)
