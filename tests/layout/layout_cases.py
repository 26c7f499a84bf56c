"""Random parallel layouts, planned by `layout/` and spelled out by the oracle."""

from dataclasses import dataclass

import numpy as np

from foreroute import LayerKind, RoutedLayer, RoutingSpec, RoutingTrace, layout
from tests.layout import layout_oracle as oracle


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    batches: tuple[tuple[int, ...], ...]
    form: str
    side: str
    align: int
    width: int
    total: tuple[int, int]
    cp: int
    tp: int
    spec: RoutingSpec

    def plan(self, sequences, cp_rank, tp_rank):
        """The router rows of a micro-batch; rows are numbered as in the trace of all sequences."""
        lengths = np.array(self.lengths, np.int64)[list(sequences)]
        if self.form == "thd":
            here = layout.pack(lengths, align=self.align).align_total(self.total[0])
        else:
            here = layout.pad(lengths, side=self.side, order=self.form, to=self.grid_width(sequences))
        here = here.split_context(self.cp, cp_rank)
        if self.form == "thd":
            here = here.align_total(self.total[1])
        here = here.split_sequence(self.tp, tp_rank)
        rows = here.rows()
        assert (rows.num_rows, here.num_router_rows) == (lengths.sum(), len(rows.packed_row_R))
        assert np.array_equal(rows.is_pad_R, rows.packed_row_R < 0)
        first = np.cumsum((0, *self.lengths))
        of_trace = np.concatenate([np.arange(first[s], first[s + 1]) for s in sequences] + [[-1]])
        return layout.RankRows(of_trace[rows.packed_row_R].astype(rows.packed_row_R.dtype), sum(self.lengths))

    def expected(self, sequences, cp_rank, tp_rank):
        if self.form == "thd":
            lanes = oracle.packed_lanes(self.lengths, sequences, self.align)
            lanes.append(oracle.tail_to_multiple(oracle.one_line(lanes), self.total[0]))
        else:
            lanes = oracle.padded_lanes(self.lengths, sequences, self.side, self.grid_width(sequences))
        lanes = [oracle.context_share(lane, self.cp, cp_rank) for lane in lanes]
        if self.form == "thd":
            line = oracle.one_line(lanes)
            line += oracle.tail_to_multiple(line, self.total[1])
            return oracle.sequence_share(line, self.tp, tp_rank)
        lanes = [oracle.sequence_share(lane, self.tp, tp_rank) for lane in lanes]
        return oracle.one_line(lanes) if self.form == "bshd" else oracle.sequence_first(lanes)

    def grid_width(self, sequences):
        width = max((self.lengths[s] for s in sequences), default=0) + self.width
        return -(-width // self.align) * self.align

    def ranks(self):
        return [(c, t) for c in range(self.cp) for t in range(self.tp)]


def canary_trace(lengths, spec, *, last_absent=True):
    """A trace whose picks name their place: digits of row times L plus layer, each in a band of experts of its own."""
    rows = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1]) if len(lengths) else []
    code_NL = np.arange(sum(lengths) * spec.num_layers).reshape(-1, spec.num_layers, 1)
    base, k = spec.num_experts // spec.top_k, np.arange(spec.top_k)
    assert code_NL.size <= base**spec.top_k, "two places would have the same picks"
    ids_NLK = code_NL // base**k % base + base * k
    return RoutingTrace.from_sequences(spec, rows, [ids_NLK[r[:-1] if last_absent else r] for r in rows])


def decoded(trace, ids):
    """(sample, position, layer) [..., 3] that picks [..., K] of a canary were made for; -1 where they were for none."""
    spec = trace.spec
    base, k = spec.num_experts // spec.top_k, np.arange(spec.top_k)
    digits = np.asarray(ids, np.int64) - base * k
    row, layer = np.divmod((digits * base**k).sum(axis=-1), spec.num_layers)
    known = ((digits >= 0) & (digits < base)).all(axis=-1) & (row < trace.num_rows)
    sample = np.searchsorted(trace.offsets, np.where(known, row, 0), side="right") - 1
    return np.where(known[..., None], np.stack([sample, row - trace.offsets[sample], layer], axis=-1), -1)


def draw_case(seed):
    """A layout that is possible, of any of the forms, small enough for the oracle's loops."""
    rng = np.random.default_rng(seed)
    cp, tp = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    chunks = 2 * cp if cp > 1 else 1
    form = str(rng.choice(["thd", "bshd", "sbhd"]))
    lengths = rng.integers(0 if rng.random() < 0.2 else 1, int(rng.choice([3, 9, 21])), int(rng.integers(1, 7)))
    # a packed line is aligned to TP as a whole, a grid is as wide as all its splits need
    align = chunks * int(rng.integers(1, 4)) * (1 if form == "thd" else tp)
    return Case(
        lengths=tuple(int(n) for n in lengths),
        batches=_draw_batches(rng, len(lengths)),
        form=form,
        side=str(rng.choice(["left", "right"])),
        align=align,
        width=int(rng.integers(0, 4)),
        total=(chunks * int(rng.integers(1, 5)), tp * int(rng.integers(1, 5))),
        cp=cp,
        tp=tp,
        spec=draw_model(rng),
    )


def draw_model(rng):
    """A layer table with dense layers between others of any kind, in any order."""
    layers = [RoutedLayer(int(i), kind) for kind in LayerKind for i in np.flatnonzero(rng.random(4) < 0.5)]
    layers = [layers[i] for i in rng.permutation(len(layers))] or [RoutedLayer(0, LayerKind.MTP)]
    num_experts, top_k = ((4096, 1), (256, 2), (64, 4), (128, 8), (512, 10))[int(rng.integers(5))]
    return RoutingSpec(num_experts, top_k, tuple(layers), model="canary")


def _draw_batches(rng, size):
    """Micro-batches of any sequences in any order; some of all, and some of one alone."""
    chosen = rng.permutation(size)[: int(rng.integers(1, size + 1)) if rng.random() < 0.3 else size]
    cuts = np.sort(rng.integers(0, len(chosen), int(rng.integers(0, 4))))
    return tuple(tuple(part.tolist()) for part in np.split(chosen, cuts) if len(part))
