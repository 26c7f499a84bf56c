"""One way of training in parallel. Imports nothing of Megatron, so that tests can be listed without it."""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    ep: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    etp: int = 1
    recompute: str = "none"
    dispatcher: str = "alltoall"
    packed: bool = False
    as_shipped: bool = False
    layers: int = 4
    settings: tuple = ()

    @property
    def ranks(self):
        """Processes. Experts share those of tensor and context parallelism, or add data-parallel ones."""
        return self.pp * max(self.tp * self.cp, self.ep * self.etp)

    @property
    def routed_layers(self):
        """Decoder layers with experts, from 0."""
        pattern = dict(self.settings).get("moe_layer_freq", [1] * self.layers)
        return [layer for layer, has_experts in enumerate(pattern) if has_experts]

    @property
    def same_shapes(self):
        """Whether Megatron wants every micro-batch to have equally many slots.

        The all-gather dispatcher does, and so does a ring of two virtual stages, whose shapes would change places.
        """
        return self.dispatcher == "allgather" or self.vpp > 1

    @property
    def split(self):
        """How the model is split, in words."""
        sizes = [f"{n}{getattr(self, n)}" for n in ("ep", "tp", "etp", "pp", "vpp", "cp") if getattr(self, n) > 1]
        return "-".join(sizes) or "whole"

    def __str__(self):
        return " ".join([self.split, self.recompute, self.dispatcher, "packed" if self.packed else "padded"])


RECOMPUTE = ("none", "selective", "uniform", "block")
MOST_RANKS = 4
"""What two cores carry."""

PARALLEL = [
    Cell(ep=ep, tp=tp, pp=pp, vpp=vpp, cp=cp, layers=2 if pp == 1 else 4)
    for (pp, vpp), cp, tp, ep in itertools.product([(1, 1), (2, 1), (2, 2)], (1, 2), (1, 2), (1, 2))
]
"""The ways of splitting the model that the grid crosses with every variant."""

VARIANTS = list(itertools.product(RECOMPUTE, ("alltoall", "allgather"), (False, True)))
"""(recompute, dispatcher, packed)."""


def variants_of(parallel, every):
    """The cells of one split: all 16, or four that have every level of every factor."""
    chosen = VARIANTS if every else _covering(PARALLEL.index(parallel))
    return [
        dataclasses.replace(parallel, recompute=recompute, dispatcher=dispatcher, packed=packed)
        for recompute, dispatcher, packed in chosen
    ]


def _covering(turn):
    """Every recompute once, each dispatcher and each packing twice, in another combination at every turn."""
    pairs = list(itertools.product(("alltoall", "allgather"), (False, True)))
    return [(recompute, *pairs[(i + turn) % 4]) for i, recompute in enumerate(RECOMPUTE)]
