"""Routes as a Megatron-Core model takes them, in training forwards or in static inference, put together over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.megatron.call import Call, lengths_of, packed_slots
from foreroute.adapters.megatron.passes import Listener, Orders
from foreroute.adapters.megatron.ranks import Share
from foreroute.errors import BatchMismatchError, ReplayError
from foreroute.layout import Layout, collect, pack, pad
from foreroute.layout.slots import Side
from foreroute.replay import PassNotes, Watch, required
from foreroute.trace import NO_VERSION, RoutedLayer, RoutingSpec, RoutingTrace, concatenate


@dataclass(frozen=True)
class RecordedPass:
    """One forward of one chunk.

    Attributes:
        layout: where its sequences are, before ranks share them.
        lengths: int64 [S], of its sequences.
        past: positions that a key-value cache held before.
        tokens_C: the tokens that this rank was given, or None.
        ids_LRK: uint8 or uint16 [L, R, K], still on the device; None of a chunk without routers.
    """

    layout: Layout
    lengths: NDArray[np.int64]
    past: int
    tokens_C: NDArray[np.int64] | None
    ids_LRK: Tensor | None


@dataclass(frozen=True)
class Groups:
    """Process groups over which a recording is put together: None where its ranks hold the same rows."""

    sequence: Any
    context: Any
    pipeline: Any


@dataclass(frozen=True)
class RankPart:
    """What one pipeline rank knows of one micro-batch: all rows of its layers, and tokens if it was given any."""

    lengths: NDArray[np.int64]
    past: int
    tokens_N: NDArray[np.int64] | None
    layers: dict[RoutedLayer, NDArray[Any]] = field(default_factory=dict)


class Recording(Listener):
    """Collects the routes of every forward in a `record()` session.

    In training every forward of a chunk is a micro-batch with new sequences. In static inference a forward at offset 0
    begins new ones and the next ones continue them. Routes stay on the device until `trace()` is called; tokens do not.
    """

    watch = Watch(ids=True)

    def __init__(
        self,
        spec: RoutingSpec,
        chunk_layers: list[tuple[RoutedLayer, ...]],
        share: Share,
        groups: Groups,
        weight_version: int,
        provenance: dict[str, str],
    ) -> None:
        self._spec = spec
        self._chunk_layers = chunk_layers
        self._share = share
        self._groups = groups
        self._version = weight_version
        self._provenance = provenance
        self._passes: list[list[RecordedPass]] = [[] for _ in chunk_layers]
        self._pending: RecordedPass | None = None

    def begin(self, chunk: int, call: Call, device: torch.device) -> Orders | None:
        """See where the sequences are; chunks without routers have no notes to wait for."""
        lengths, layout = _sequences_of(call, self._share)
        self._pending = RecordedPass(layout, lengths, _past(call), call.tokens_C, None)
        if not self._chunk_layers[chunk]:
            self._passes[chunk].append(self._pending)
        return None

    def end(self, chunk: int, call: Call, notes: PassNotes) -> None:
        """Keep the pass; one that failed is forgotten."""
        assert self._pending is not None, "a pass ends after it has begun"
        p = self._pending
        self._passes[chunk].append(RecordedPass(p.layout, p.lengths, p.past, p.tokens_C, required(notes.ids_LRK)))

    def trace(self) -> RoutingTrace:
        """Everything recorded so far: all layers and rows, in the order of the micro-batches, on every rank.

        Every rank of the model must call it, like a collective of torch.distributed. Padding between packed sequences,
        and what `padding_mask` marks, is left out; what else fills up a padded batch is not known to be padding: cut it
        with `trace.truncated`. Rows carry the weight version given to `record()`.

        Raises:
            ReplayError: when no forward ran in the session, or the chunks of a rank ran different numbers of them.
        """
        counts = {len(passes) for passes in self._passes}
        if counts == {0}:
            raise ReplayError("nothing was recorded: no forward of the attached model ran in the record() session")
        if len(counts) > 1:
            raise ReplayError(
                f"the chunks of this rank ran {[len(p) for p in self._passes]} forwards; expected one of each for "
                "every micro-batch"
            )
        parts = [self._rank_part([passes[m] for passes in self._passes]) for m in range(counts.pop())]
        everywhere = _gathered(parts, self._groups.pipeline)
        joined = [self._joined([rank[m] for rank in everywhere]) for m in range(len(parts))]
        traces = [self._trace_of(group) for group in _continued(joined)]
        return concatenate(traces).with_weight_version(self._version).with_provenance(**self._provenance)

    def _rank_part(self, of_chunks: list[RecordedPass]) -> RankPart:
        first = of_chunks[0]
        part = RankPart(first.lengths, first.past, self._tokens(first))
        for layers, recorded in zip(self._chunk_layers, of_chunks, strict=True):
            if recorded.ids_LRK is not None:
                ids_NLK = self._rows(first.layout, recorded.ids_LRK.cpu().numpy().transpose(1, 0, 2))
                part.layers.update({layer: ids_NLK[:, i] for i, layer in enumerate(layers)})
        return part

    def _rows(self, layout: Layout, ids_RLK: NDArray[Any]) -> NDArray[Any]:
        """All rows of the micro-batch, from the ranks that share them."""
        of_ranks = _gathered(_gathered(ids_RLK, self._groups.sequence), self._groups.context)
        return collect(
            (self._share.of_routers(layout, c, s).rows(), ids)
            for c, of_sequence in enumerate(of_ranks)
            for s, ids in enumerate(of_sequence)
        )

    def _tokens(self, recorded: RecordedPass) -> NDArray[np.int64] | None:
        if recorded.tokens_C is None:
            return None
        of_ranks = _gathered(recorded.tokens_C, self._groups.context)
        return collect((self._share.of_context(recorded.layout, c).rows(), tokens) for c, tokens in enumerate(of_ranks))

    def _joined(self, of_ranks: list[RankPart]) -> RankPart:
        tokens_N = next((part.tokens_N for part in of_ranks if part.tokens_N is not None), None)
        if tokens_N is None:
            raise ReplayError("no pipeline stage was given the tokens of a micro-batch, so that no trace can be made")
        layers = {layer: ids for part in of_ranks for layer, ids in part.layers.items()}
        return RankPart(of_ranks[0].lengths, of_ranks[0].past, tokens_N, layers)

    def _trace_of(self, group: list[RankPart]) -> RoutingTrace:
        """One batch of sequences, as they grew."""
        tokens, routes = [], []
        for s in range(len(group[0].lengths)):
            steps = [(part, int(part.lengths[:s].sum()), int(part.lengths[: s + 1].sum())) for part in group]
            tokens.append(np.concatenate([required_tokens(part)[a:b] for part, a, b in steps]))
            routes.append(
                np.concatenate(
                    [np.stack([part.layers[layer][a:b] for layer in self._spec.layers], 1) for part, a, b in steps]
                )
            )
        return RoutingTrace.from_sequences(self._spec, tokens, routes, weight_version=NO_VERSION)


def required_tokens(part: RankPart) -> NDArray[np.int64]:
    """Its tokens, of a part that was joined over the pipeline."""
    assert part.tokens_N is not None, "parts without tokens are refused when they are joined"
    return part.tokens_N


def _sequences_of(call: Call, share: Share) -> tuple[NDArray[np.int64], Layout]:
    """Lengths of the sequences of a batch, and where they are."""
    if call.packed is not None:
        lengths = lengths_of(call.packed.cu_seqlens_q)
        layout = pack(lengths, slots=packed_slots(call.packed))
        width = 0 if call.input_ids is None else call.input_ids.numel() * share.cp
        return lengths, layout.align_total(width) if width > layout.num_slots else layout
    if call.input_ids is None:
        raise BatchMismatchError("this pipeline stage is given no tokens; pass input_ids on every stage to record")
    batch, width = call.input_ids.shape
    lengths = np.full(batch, width * share.cp)
    if call.padding_mask is None:
        return lengths, pad(lengths, side="right", order="sbhd")
    return _masked(call.padding_mask.cpu().numpy().astype(np.bool_), share)


def _masked(padding_BT: NDArray[np.bool_], share: Share) -> tuple[NDArray[np.int64], Layout]:
    lengths = (~padding_BT).sum(axis=1)
    sides: dict[Side, NDArray[np.bool_]] = {"right": padding_BT[:, ::-1], "left": padding_BT}
    position = np.arange(padding_BT.shape[1])
    for side, from_it in sides.items():
        # padding on one side: after so many slots of it, seen from there, no more
        if share.cp == 1 and (from_it == (position < padding_BT.sum(axis=1)[:, None])).all():
            layout = pad(lengths, side=side, order="sbhd", to=padding_BT.shape[1])
            return lengths, layout
    raise BatchMismatchError(
        "padding_mask marks slots on both sides or in between, or context parallelism cuts it; record such a batch "
        "without the mask and cut the trace with trace.truncated(lengths)"
    )


def _past(call: Call) -> int:
    if call.inference is None:
        return 0
    if not call.inference.is_static_batching():
        raise ReplayError(
            "a dynamic inference context mixes steps of several requests in one forward, and which is whose is not "
            "known here. Record static inference, or take the routes that the dynamic engine returns"
        )
    return int(call.inference.sequence_len_offset)


def _gathered(value: Any, group: Any) -> list[Any]:
    """The value of each rank of a group, in its order."""
    if group is None or group.size() == 1:
        return [value]
    values: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def _continued(parts: list[RankPart]) -> list[list[RankPart]]:
    """Micro-batches that belong to the same sequences."""
    groups: list[list[RankPart]] = []
    for part in parts:
        if part.past == 0 or not groups:
            groups.append([part])
            continue
        reached = groups[-1][0].past + sum(int(p.lengths[0]) for p in groups[-1])
        if len(part.lengths) != len(groups[-1][0].lengths) or part.past != reached:
            raise ReplayError(
                f"a forward continues {len(part.lengths)} sequences at offset {part.past}; the batch before it has "
                f"{len(groups[-1][0].lengths)} of {reached}. Record each batch of sequences in a session of its own"
            )
        groups[-1].append(part)
    return groups
