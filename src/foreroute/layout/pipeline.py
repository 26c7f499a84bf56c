"""Which routed layers a pipeline rank and its virtual chunks hold, by the layers' names."""

from __future__ import annotations

from dataclasses import dataclass

from foreroute.errors import LayoutError
from foreroute.trace import LayerKind, RoutedLayer, RoutingSpec


@dataclass(frozen=True)
class PipelineStages:
    """How many decoder layers, dense and routed alike, each virtual chunk of each pipeline rank runs.

    The model runs through chunk 0 of all ranks, then chunk 1 of all ranks, and so on; MTP layers follow the last stage.

        PP = 2, VPP = 2, 8 layers:   rank 0: chunk 0 = 0 1, chunk 1 = 4 5    rank 1: chunk 0 = 2 3, chunk 1 = 6 7

    Attributes:
        counts: VPP tuples of PP counts, `counts[chunk][rank]`. Any split can be written down; `even` writes the usual.
    """

    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        widths = {len(chunk) for chunk in self.counts}
        if len(widths) != 1 or 0 in widths or any(n < 0 for chunk in self.counts for n in chunk):
            raise LayoutError(
                f"stage counts {self.counts} are no table; expected for every virtual chunk one count, "
                "zero or more, for every pipeline rank"
            )

    @classmethod
    def even(
        cls, num_layers: int, pp: int, vpp: int = 1, *, first: int | None = None, last: int | None = None
    ) -> PipelineStages:
        """Equal stages, save the first and last rank where they are given, as in Megatron-Core.

        Args:
            num_layers: decoder layers of the model, dense ones included, MTP layers not.
            pp: pipeline ranks.
            vpp: virtual chunks per rank.
            first: decoder layers on the first rank, all its chunks together (`num_layers_in_first_pipeline_stage`).
            last: decoder layers on the last rank, all its chunks together.

        Raises:
            LayoutError: when the layers do not divide.
        """
        if pp < 1 or vpp < 1:
            raise LayoutError(f"got {pp} pipeline ranks with {vpp} chunks; expected at least 1 of each")
        given = [first if rank == 0 else last if rank == pp - 1 else None for rank in range(pp)]
        if pp == 1 and last is not None:
            raise LayoutError("a pipeline of one rank has no last rank beside its first; leave `last` out")
        open_ranks = given.count(None)
        rest = num_layers - sum(n for n in given if n is not None)
        if rest < 0 or (rest % (open_ranks * vpp) if open_ranks else rest) or any((n or 0) % vpp for n in given):
            raise LayoutError(
                f"{num_layers} decoder layers (first {first}, last {last}) do not divide over {pp} pipeline ranks "
                f"with {vpp} chunks each; give the counts of every stage: PipelineStages(counts)"
            )
        share = rest // open_ranks if open_ranks else 0
        chunk = tuple((share if n is None else n) // vpp for n in given)
        return cls((chunk,) * vpp)

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.counts[0])

    @property
    def vpp(self) -> int:
        """Virtual chunks per rank."""
        return len(self.counts)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return sum(map(sum, self.counts))

    def decoder_range(self, rank: int, chunk: int = 0) -> range:
        """The decoder layers of one stage, dense ones included."""
        if not (0 <= rank < self.pp and 0 <= chunk < self.vpp):
            raise LayoutError(
                f"pipeline rank {rank}, chunk {chunk} is not one of {self.pp} ranks with {self.vpp} chunks, from 0"
            )
        before = sum(map(sum, self.counts[:chunk])) + sum(self.counts[chunk][:rank])
        return range(before, before + self.counts[chunk][rank])

    def layers(self, spec: RoutingSpec, rank: int, chunk: int = 0) -> tuple[RoutedLayer, ...]:
        """The routed decoder layers of one stage, also those hash-routed or in attention, in the order they run.

        Dense layers have no name in the table and take up their place all the same. MTP and draft layers number from 0
        on their own and are told apart by kind, so that MTP layer 0 is never decoder layer 0.

        Raises:
            LayoutError: when the table names a decoder layer that no stage runs, or one layer twice.
        """
        held = self.decoder_range(rank, chunk)
        decoder = [layer for layer in spec.layers if layer.kind in (LayerKind.DECODER, LayerKind.HASH)]
        stacked = [layer for layer in spec.layers if layer in decoder or layer.kind is LayerKind.ATTENTION]
        outside = [str(layer) for layer in stacked if not 0 <= layer.index < self.num_layers]
        if outside:
            raise LayoutError(
                f"the stages run {self.num_layers} decoder layers and the trace routes {', '.join(outside)}; "
                "count dense layers too, and MTP layers not, and check that the trace is of this model"
            )
        if len({layer.index for layer in decoder}) != len(decoder):
            raise LayoutError(
                "the table has a decoder and a hash-routed layer of one index; a hash-routed layer takes "
                "its index from the decoder stack that it stands in"
            )
        return tuple(sorted((layer for layer in stacked if layer.index in held), key=lambda layer: layer.index))

    def mtp_layers(self, spec: RoutingSpec, rank: int, chunk: int = 0) -> tuple[RoutedLayer, ...]:
        """The MTP layers of one stage: all of them on the last chunk of the last rank, none elsewhere."""
        self.decoder_range(rank, chunk)
        is_last = (rank, chunk) == (self.pp - 1, self.vpp - 1)
        return tuple(sorted(layer for layer in spec.layers if is_last and layer.kind is LayerKind.MTP))
