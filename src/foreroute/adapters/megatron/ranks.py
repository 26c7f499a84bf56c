"""Which share of the rows this rank's routers see, as Megatron's own process groups and configuration say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from foreroute.errors import LayoutError
from foreroute.layout import Layout


@dataclass(frozen=True)
class Share:
    """The place of this rank among those that share the rows of a micro-batch.

    Attributes:
        cp: context-parallel ranks; each sequence is dealt to them in zigzag chunks.
        cp_rank: which of them this is.
        sp: ranks that cut what is left along the sequence: tensor-parallel ranks under sequence parallelism, else 1.
        sp_rank: which of them this is.
        number: tells ranks with different rows apart, and not those with the same.
    """

    cp: int = 1
    cp_rank: int = 0
    sp: int = 1
    sp_rank: int = 0
    number: int = 0

    @classmethod
    def of(cls, trunk: Any, routers: list[Any]) -> Share:
        """Read off the groups of the routers, or of the model where a stage has none."""
        owner = routers[0] if routers else trunk
        tp_group, cp_group = owner.tp_group, owner.cp_group
        tp, cp = tp_group.size(), cp_group.size()
        sequence_parallel = tp > 1 and bool(trunk.config.sequence_parallel)
        rank = torch.distributed.get_rank()
        return cls(
            cp,
            cp_group.rank(),
            tp if sequence_parallel else 1,
            tp_group.rank() if sequence_parallel else 0,
            rank if sequence_parallel else rank // tp,
        )

    def of_context(self, layout: Layout, rank: int | None = None) -> Layout:
        """The slots that the model is handed on this context-parallel rank, or on another one.

        Raises:
            LayoutError: when the layout was split already, has batch-first rows, or does not divide.
        """
        if layout.is_split or layout.order == "bshd":
            raise LayoutError(
                f"the layout is {'split already' if layout.is_split else 'batch first'}; give the whole one, packed "
                'or sequence first (pad(..., order="sbhd")): Megatron itself says how ranks share it'
            )
        return layout.split_context(self.cp, self.cp_rank if rank is None else rank)

    def of_routers(self, layout: Layout, context: int | None = None, sequence: int | None = None) -> Layout:
        """The slots that routers see on this rank, or on another one. Raises as `of_context`."""
        part = self.of_context(layout, context)
        return part.split_sequence(self.sp, self.sp_rank if sequence is None else sequence)
