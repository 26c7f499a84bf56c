"""Choices of sparse-attention indexers: the units of a sequence a query attends to, and in which layers. No torch.

A unit is a token, or a pool, block or compressed entry of several. Units are counted from the first token of their
sequence, so that a layout moves rows and leaves choices as they are. Where several index heads choose for
themselves, unit u of head h has the id u · H + h.

A query that sees no more than `top_k` units attends to all of them, and its set has no ids. Any other has exactly
`top_k` for each head. So a set says by its size alone where it may stand, and rows that were shifted do not pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.checks import whole_number
from foreroute.errors import SpecMismatchError, TraceContentError
from foreroute.trace.checks import join_ranges, place_of
from foreroute.trace.spec import RoutedLayer
from foreroute.trace.streams import MOST_CHOICES, DecisionStream, as_choices

INDEXER = "indexer"
"""The stream of indexer choices: ids are units of the sequence, and D layers decide."""


@dataclass(frozen=True)
class IndexerSpec:
    """The facts of a model's indexers.

    Attributes:
        top_k: units that a query attends to, for each head, where it sees more.
        layers: the D layers that have an indexer of their own, and do not share that of another.
        unit: tokens of a unit.
        heads: H, index heads that choose for themselves.
        sees_begun: whether a query sees the unit that it is in; else a unit is seen from its last token on.
    """

    top_k: int
    layers: tuple[RoutedLayer, ...]
    unit: int = 1
    heads: int = 1
    sees_begun: bool = False

    def __post_init__(self) -> None:
        for name in ("top_k", "unit", "heads"):
            object.__setattr__(self, name, whole_number(getattr(self, name), name=name, most=MOST_CHOICES))
        object.__setattr__(self, "layers", as_choices(MOST_CHOICES, self.layers)[1])

    def num_visible(self, position_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count the units that a query at each position sees, int64 [N]; none at a negative one, such as of padding."""
        through = position_N + (self.unit if self.sees_begun else 1)
        return np.where(position_N < 0, 0, through // self.unit)

    def stream(
        self, position_N: NDArray[np.int64], chosen: Iterable[tuple[NDArray[np.int64], NDArray[np.int32]]]
    ) -> DecisionStream:
        """Pack choices at positions, int64 [N]: of each layer, counts [N] and the ids of all sets, ascending in each.

        Raises:
            TraceContentError: for an id twice in a set, or a unit that its query does not see.
        """
        everything_N = self.heads * self.num_visible(position_N)
        sets_of = []
        for layer, (counts_N, ids) in enumerate(chosen):
            # What is not a part must be all that its query sees, unit by unit; it is then stored as a set without ids.
            is_part_N = counts_N < everything_N
            is_kept = np.repeat(is_part_N, counts_N)
            all_seen = join_ranges(np.zeros(int((~is_part_N).sum()), np.int64), everything_N[~is_part_N])
            if not np.array_equal(ids[~is_kept], all_seen):
                raise TraceContentError(
                    f"in {self.layers[layer]} a query has units twice, or some that it does not see"
                )
            sets_of.append((counts_N * is_part_N, ids[is_kept]))
        return DecisionStream.from_layers(MOST_CHOICES, np.ones(len(position_N), np.bool_), sets_of, self.layers)

    def check(self, stream: DecisionStream, offsets: NDArray[np.int64]) -> None:
        """Raise unless a stream of sequences with these `offsets`, int64 [S + 1], can be choices of such indexers.

        Raises:
            SpecMismatchError: when other layers choose.
            TraceContentError: naming the first row that has too few or too many units, or one that it does not see.
        """
        if (stream.layers, stream.num_choices) != (self.layers, MOST_CHOICES):
            raise SpecMismatchError(
                f"the choices of indexers are of {_named(stream.layers)} with ids below {stream.num_choices}; expected "
                f"{_named(self.layers)} with ids below {MOST_CHOICES}. Use the trace that was recorded for this model"
            )
        visible_N = self.num_visible(np.arange(stream.num_rows) - np.repeat(offsets[:-1], np.diff(offsets)))
        expected_N = np.where(visible_N > self.top_k, self.heads * self.top_k, 0)
        counts_ND = stream.counts_ND
        wrong_ND = (counts_ND != expected_N[:, None]) & stream.valid_N[:, None]
        if not wrong_ND.any():
            is_set_ND = counts_ND > 0
            sets = stream.ids.reshape(-1, self.heads * self.top_k)  # each of the same size
            is_wrong = sets[:, -1] // self.heads >= np.broadcast_to(visible_N[:, None], counts_ND.shape)[is_set_ND]
            if self.heads > 1:
                heads = np.sort(sets % self.heads, axis=1)
                is_wrong |= (heads != np.repeat(np.arange(self.heads), self.top_k)).any(axis=1)
            wrong_ND[is_set_ND] = is_wrong
        if wrong_ND.any():
            row, layer = (int(i) for i in np.argwhere(wrong_ND)[0])
            sequence, position = place_of(row, offsets)
            ids = stream.ids[stream.offsets[row * stream.depth + layer] :][: counts_ND[row, layer]]
            raise TraceContentError(
                f"sequence {sequence}, position {position}, {self.layers[layer]}: the indexer has "
                f"{len(ids)} choices{f' up to unit {ids[-1] // self.heads}' if len(ids) else ''}; a query there sees "
                f"{visible_N[row]} units of {self.unit} tokens, so that {expected_N[row]} choices below that number "
                f"were expected ({self.heads} heads of {self.top_k}; none where all is seen). They belong to another "
                "row, or to a model with other indexers"
            )


def _named(layers: tuple[RoutedLayer, ...]) -> str:
    """Name the first layers of a table."""
    return f"{len(layers)} layers [{', '.join(map(str, layers[:4]))}{', …' if len(layers) > 4 else ''}]"
