"""Hosts of experts: the one form that searching, pricing, pruning, checking and scheduling share.

A *cell* (m, l) is one routed layer in one micro-step; it is a barrier for all ranks. Cells are numbered in the order of
execution, m * L + l. A *host* is an (expert, rank) pair that serves tokens. Every expert has a home, which serves what
no other host does, so only the others are written down: the *replicas*. Axis letters: M micro-steps, L layers,
C = M * L cells, G ranks, E logical experts, R replicas. *Host memory* is another thing, that of a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import PlanError
from foreroute.kernels import ArrayOf, StructOf
from foreroute.trace.checks import ascending


class CellPlan(NamedTuple):
    """The hosts of one cell. Compiled code takes it as it stands (hosts.hpp).

    Attributes:
        home_E: int16 [E], the rank that every expert lives on, and is trained on.
        expert_R: int16 [R], the expert of each replica.
        rank_R: int16 [R], the rank that it is served on. A plan that can be executed names no home here, and no
            (expert, rank) pair twice.
        slot_R: int16 [R], the redundant slot of that rank that holds it, each at most once; -1 where a balancer says
            nothing of slots.
        fetched_R: bool [R], False where the slot holds the expert since an earlier micro-step of the layer.
        tokens_RG: int32 [R, G], assignments of source rank g to this expert that this replica serves. The home serves
            the rest: `counts_GE[g, e]` minus those of the replicas of e.
    """

    home_E: NDArray[np.int16]
    expert_R: NDArray[np.int16]
    rank_R: NDArray[np.int16]
    slot_R: NDArray[np.int16]
    fetched_R: NDArray[np.bool_]
    tokens_RG: NDArray[np.int32]

    @classmethod
    def homes_only(cls, home_E: NDArray[np.int16], num_ranks: int) -> CellPlan:
        """Make the plan of a cell without replicas, whose homes serve all tokens of G = `num_ranks` ranks."""
        none = np.empty(0, np.int16)
        return cls(home_E, none, none, none, np.empty(0, np.bool_), np.empty((0, num_ranks), np.int32))

    def only(self, rows: NDArray[np.bool_] | slice) -> CellPlan:
        """Return the cell with some of its replicas alone."""
        some: Iterator[Any] = (array[rows] for array in self[1:])
        return CellPlan(self.home_E, *some)

    def home_tokens_GE(self, counts_GE: NDArray[np.integer]) -> NDArray[np.int64]:
        """Count the assignments of source rank g to expert e that the home rank of e serves: int64 [G, E]."""
        rest_GE = counts_GE.astype(np.int64)
        # an expert may have several replicas, each with its share
        np.subtract.at(rest_GE.T, self.expert_R, self.tokens_RG)
        return rest_GE

    def loads_G(self, counts_GE: NDArray[np.integer]) -> NDArray[np.int64]:
        """Count the assignments that each rank serves: int64 [G]."""
        loads_G = np.zeros(len(counts_GE), np.int64)
        np.add.at(loads_G, self.home_E, self.home_tokens_GE(counts_GE).sum(axis=0))
        np.add.at(loads_G, self.rank_R, self.tokens_RG.sum(axis=1))
        return loads_G

    def within(self, counts_GE: NDArray[np.integer]) -> CellPlan:
        """Return the same hosts for other counts, of which replicas serve no more than there is."""
        # replicas of one expert share what there is, in their order
        left_GE, tokens_RG = counts_GE.astype(np.int32), self.tokens_RG.copy()
        for tokens_G, expert in zip(tokens_RG, self.expert_R, strict=True):
            np.minimum(tokens_G, left_GE[:, expert], out=tokens_G)
            left_GE[:, expert] -= tokens_G
        return self._replace(tokens_RG=tokens_RG)


class Hosts(NamedTuple):
    """The hosts of consecutive micro-steps of some layers, as flat arrays that compiled code takes (hosts.hpp).

    Attributes:
        home_LE: int16 [L, E], the homes.
        offsets: int64 [C + 1], cell c owns the replicas `offsets[c]:offsets[c + 1]`. There may be room behind the last.
        expert_R, rank_R, slot_R, fetched_R, tokens_RG: as in `CellPlan`, and in its order.
    """

    home_LE: NDArray[np.int16]
    offsets: NDArray[np.int64]
    expert_R: NDArray[np.int16]
    rank_R: NDArray[np.int16]
    slot_R: NDArray[np.int16]
    fetched_R: NDArray[np.bool_]
    tokens_RG: NDArray[np.int32]

    @classmethod
    def with_room(cls, home_LE: NDArray[np.int16], num_micro_steps: int, num_ranks: int, most: int) -> Hosts:
        """Make hosts without replicas yet, with room for `most` in each cell."""
        cells = num_micro_steps * len(home_LE)
        rows = cells * most  # pages that are never written take no memory
        return cls(
            home_LE,
            np.zeros(cells + 1, np.int64),
            np.empty(rows, np.int16),
            np.empty(rows, np.int16),
            np.empty(rows, np.int16),
            np.empty(rows, np.bool_),
            np.empty((rows, num_ranks), np.int32),
        )

    @classmethod
    def of_cells(cls, home_LE: NDArray[np.int16], cells: Sequence[CellPlan]) -> Hosts:
        """Join cells, one at least, whose integers may be wider than those of hosts."""
        return _concatenated(home_LE, [len(cell.expert_R) for cell in cells], [cell[1:] for cell in cells])

    @classmethod
    def side_by_side(cls, layers: Sequence[Hosts]) -> Hosts:
        """Join the same micro-steps of layers with those of layers behind them; one alone stays as it is."""
        if len(layers) == 1:
            return layers[0]
        num_micro_steps = (len(layers[0].offsets) - 1) // len(layers[0].home_LE)
        parts = [hosts.part(m, m + 1) for m in range(num_micro_steps) for hosts in layers]
        home_LE = np.concatenate([hosts.home_LE for hosts in layers])
        sizes_C = np.concatenate([np.diff(part.offsets) for part in parts])
        return _concatenated(home_LE, sizes_C, [part[2:] for part in parts])

    def write(self, micro_step: int, others: Hosts) -> None:
        """Put the micro-steps from `micro_step` on, which are the last so far, where there is room."""
        first = micro_step * len(self.home_LE)
        begin = self.offsets[first]
        self.offsets[first : first + len(others.offsets)] = begin + others.offsets
        for name in self._fields[2:]:
            given = getattr(others, name)
            getattr(self, name)[begin : begin + len(given)] = given

    @property
    def cell_R(self) -> NDArray[np.int64]:
        """int64 [R], the number of each replica's cell, without the room behind the last one."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def sent_LEW(self, ranks_per_node: int) -> NDArray[np.bool_]:
        """Say whether the w-th rank of an expert's node has a replica of it, away from its home: bool [L, E, W]."""
        layer_R = self.cell_R % len(self.home_LE)
        expert_R, rank_R = self.expert_R[: len(layer_R)], self.rank_R[: len(layer_R)]
        home_R = self.home_LE[layer_R, expert_R]
        # ranks of other nodes do not read this node's memory
        is_sent_R = (home_R != rank_R) & (home_R // ranks_per_node == rank_R // ranks_per_node)
        sent_LEW = np.zeros((*self.home_LE.shape, ranks_per_node), np.bool_)
        sent_LEW[layer_R[is_sent_R], expert_R[is_sent_R], rank_R[is_sent_R] % ranks_per_node] = True
        return sent_LEW

    def cell(self, micro_step: int, layer: int) -> CellPlan:
        """Return one cell, as views."""
        c = micro_step * len(self.home_LE) + layer
        return CellPlan(self.home_LE[layer], *self._rows(int(self.offsets[c]), int(self.offsets[c + 1])))

    def part(self, begin: int, end: int) -> Hosts:
        """Return the micro-steps `begin` to `end` - 1, as views."""
        offsets = self.offsets[begin * len(self.home_LE) : end * len(self.home_LE) + 1]
        return Hosts(self.home_LE, offsets - offsets[0], *self._rows(int(offsets[0]), int(offsets[-1])))

    def require_fit(self, counts_MLGE: NDArray[np.integer]) -> None:
        """Raise `PlanError` unless these are hosts of counts [M, L, G, E]; compiled loops index by every number."""
        num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
        if self.home_LE.shape != (num_layers, num_experts) or self.tokens_RG.shape[1:] != (num_ranks,):
            raise PlanError(
                f"home_LE is {list(self.home_LE.shape)} and tokens_RG of {self.tokens_RG.shape[1:]} source ranks; the "
                f"counts are of {[num_layers, num_experts]} layers and experts, and {num_ranks} ranks"
            )
        offsets, cells, rows = self.offsets, num_micro_steps * num_layers, min(map(len, self[2:]))
        # there may be room behind the last replica
        if len(offsets) != cells + 1 or not ascending(offsets, min(int(offsets[-1]), rows)):
            raise PlanError(
                f"offsets are {len(offsets)} numbers up to {offsets[-1:].tolist()}; expected {cells + 1}, which ascend "
                f"from 0 to {rows} replicas at most"
            )
        used = slice(0, int(offsets[-1]))
        for name, values, size in (
            ("home_LE", self.home_LE, num_ranks),
            ("rank_R", self.rank_R[used], num_ranks),
            ("expert_R", self.expert_R[used], num_experts),
        ):
            # as numbers without a sign those below 0 are the largest of all
            if values.view(np.uint16).max(initial=0) >= size:
                raise PlanError(f"{name} goes from {values.min()} to {values.max()}; expected 0 to {size - 1}")

    def _rows(self, begin: int, end: int) -> Iterator[Any]:
        """Give the arrays of some replicas."""
        return (array[begin:end] for array in self[2:])


def _concatenated(home_LE: NDArray[np.int16], sizes_C: ArrayLike, rows: Sequence[tuple[Any, ...]]) -> Hosts:
    """Make hosts of cells with this many replicas each, whose arrays come in pieces."""
    dtypes = (np.int16, np.int16, np.int16, np.bool_, np.int32)
    columns = zip(zip(*rows, strict=True), dtypes, strict=True)
    arrays: Iterator[Any] = (np.concatenate(pieces, dtype=dtype, casting="same_kind") for pieces, dtype in columns)
    return Hosts(np.ascontiguousarray(home_LE, np.int16), np.concatenate([[0], np.cumsum(sizes_C)]), *arrays)


_REPLICAS = {
    "expert_R": ArrayOf(np.int16, 1),
    "rank_R": ArrayOf(np.int16, 1),
    "slot_R": ArrayOf(np.int16, 1),
    "fetched_R": ArrayOf(np.bool_, 1),
    "tokens_RG": ArrayOf(np.int32, 2),
}
CELL_PLAN = StructOf(home_E=ArrayOf(np.int16, 1), **_REPLICAS)
HOSTS = StructOf(home_LE=ArrayOf(np.int16, 2), offsets=ArrayOf(np.int64, 1), **_REPLICAS)
"""As compiled loops take them."""
