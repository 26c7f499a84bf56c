"""Seconds of an expert-parallel MoE layer: the one cost model of planner, baselines and simulator.

A cell is attention | dispatch | experts | combine, each a barrier for all ranks, and nothing of it overlaps. One pass
over a cell costs

    max_g attention_g  +  2 * all-to-all  +  max_g experts_g  +  fixed

and beside it weights and gradients move, which costs only what does not fit into the time that passes take anyway.
Every formula is a function of arrays below; parameters are measured or presumed (`presets.py`) and stand in two
places: what the model is (`ModelShape`), what the machine does (`Hardware`).

Not modelled: overlap of communication with compute, jitter, launch gaps, congestion, interference of copies with
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from foreroute.checks import check_number, whole_number
from foreroute.errors import ConfigError, shown
from foreroute.kernels import BOOL, FLOAT, INT, ArrayOf, StructOf
from foreroute.plan.capabilities import FetchPath, check_paths, takes_host_memory
from foreroute.plan.hosts import Hosts
from foreroute.plan.options import SlotSharing
from foreroute.plan.topology import LEAST_RATE, MOST_RANKS, Links, Topology

MOST_OF_MODEL = {
    "num_layers": 1024,
    "num_experts": 32_768,  # plans name them in int16
    "top_k": 32_768,
    "hidden": 1 << 20,
    "intermediate": 1 << 20,
    "dense_parameters": 1 << 40,
    "attention_width": 1 << 20,
    "vocabulary": 1 << 24,
}
MOST_OF_HARDWARE = {"ranks_per_node": MOST_RANKS, "tile_rows": 1_000_000}
MOST_SECONDS, MOST_RATE, MOST_ELEMENT_BYTES, MOST_SEQUENCE, MOST_PREFETCH = 1.0, 1e24, 8, 1 << 24, 999_999
MOST_PRODUCTS = 1000
MOST_S_PER_COUNT = 1e-3
"""Most seconds of a layer, FLOPs or bytes in a second, bytes of an element, tokens of a sequence, cells ahead, products
backward over forward, and seconds for a count. Like all bounds here, more than anyone has, such that no product of them
overflows, and below what other units give: 16 bits of bfloat16, 0.02 µs for a count."""

Dispatcher = Literal["copies", "dedup"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one routed layer of a model.

    Attributes:
        num_layers: routed layers.
        num_experts: routed experts per layer.
        top_k: experts per token.
        hidden: width of the residual stream.
        intermediate: width of an expert: three matrices of hidden x intermediate.
        dense_parameters: per layer, of attention projections and shared experts.
        attention_width: query heads times mean width of query and value.
        vocabulary: columns of the output head.
        weight_bytes: per parameter, moved or read.
        gradient_bytes: per element of a returned gradient.
        activation_bytes: per element of a dispatched row.
    """

    num_layers: int
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    dense_parameters: int
    attention_width: int
    vocabulary: int
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    activation_bytes: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in MOST_OF_MODEL:
                whole_number(value, name=name, most=MOST_OF_MODEL[name], error=ConfigError)
            else:
                check_number(value, name=name, most=MOST_ELEMENT_BYTES, error=ConfigError)
        # picks of a token are distinct experts
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k is {self.top_k}; a layer of {self.num_experts} experts has no more to pick")

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert, as a number."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert."""
        return self.expert_parameters * self.weight_bytes

    @property
    def row_bytes(self) -> float:
        """One token's hidden state, as dispatched or combined."""
        return self.hidden * self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates that one rank and its links reach in practice, not their peaks.

    Attributes:
        gemm_flops_per_s: grouped matrix products of many rows.
        attention_flops_per_s: the causal attention core.
        memory_bytes_per_s: device memory.
        tile_rows: rows of a GEMM's tile, which takes as long with fewer; 1 on a CPU.
        layer_s: fixed seconds per pass and layer.
        links: bandwidths of one rank, latencies of an all-to-all.
        ranks_per_node: ranks joined by the fast link.
        backward_products: seconds of matrix products, backward over forward.
        replica_s: processor seconds per replica and forward pass, without its rows, on its rank and at its home.
        replica_backward_s: the same per backward pass.
        publish_bytes_per_s: a rank's weights to host memory; 0: host_bytes_per_s.
    """

    gemm_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    links: Links
    ranks_per_node: int = 8
    tile_rows: int = 128
    layer_s: float = 40e-6
    backward_products: float = 2.0
    replica_s: float = 0.0
    replica_backward_s: float = 0.0
    publish_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in MOST_OF_HARDWARE:
                whole_number(value, name=name, most=MOST_OF_HARDWARE[name], error=ConfigError)
            elif name.endswith("_per_s") and not (name == "publish_bytes_per_s" and value == 0):
                check_number(value, name=name, least=LEAST_RATE, most=MOST_RATE, error=ConfigError)
        check_number(self.layer_s, name="layer_s", most=MOST_SECONDS, error=ConfigError)
        check_number(self.backward_products, name="backward_products", most=MOST_PRODUCTS, error=ConfigError)
        _check_seconds(self, MOST_SECONDS, "replica_s", "replica_backward_s")

    def topology(self, num_ranks: int, redundant_slots: int) -> Topology:
        """G expert-parallel ranks of this hardware. Fewer ranks than fill one node are one node.

        Raises:
            TopologyError: when the ranks do not fill nodes.
        """
        return Topology(num_ranks, min(num_ranks, self.ranks_per_node), redundant_slots, self.links)


class PassCost(NamedTuple):
    """One way through a layer, as multiples of its forward pass. A dispatch and a combine are in each."""

    gemm: float  # FLOPs of matrix products
    weights: float  # bytes of expert weights and their gradients
    memory: float  # bytes of permuting, activating and unpermuting rows
    attention: float  # FLOPs of the attention core


FORWARD = PassCost(1.0, 1.0, 1.0, 1.0)
# Two products per forward product; weights are read and their float32 gradients read and written; attention is
# computed anew inside its kernel.
BACKWARD = PassCost(2.0, 4.0, 1.6, 3.0)


PASSES = (((1, 0),), ((1, 0), (1, 1)))
"""Recompute and update, each as its sweeps of (forward passes, backward passes) over every cell, in order. The update
goes through all layers forward, then backward, where each layer's activations are first computed anew and replicas
return gradients. Weights of replicas are fetched once for each sweep, while the sweep before it runs."""
_SWEEPS = np.array([(s, *sweep) for s, sweeps in enumerate(PASSES) for sweep in sweeps])


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of one model on one kind of hardware.

    Attributes:
        model: what is computed.
        hardware: what computes it.
        dispatcher: "copies" sends every assignment, "dedup" a token once per node and rank.
        paths: "direct": replicas peer to peer; "host": through host memory within a node.
        prefetch: cells fetched ahead, 0 or more.
        sequence_tokens: sequence length, where none is given.
        trial_s_per_count: seconds to build and price one plan of a cell, per count (G * E).
        plan_s_per_count: seconds to plan and compile a cell, per count.
        begin_s: seconds to agree on a plan, per step.
    """

    model: ModelShape
    hardware: Hardware
    dispatcher: Dispatcher = "copies"
    paths: FetchPath = "direct"
    prefetch: int = 1
    sequence_tokens: float = 4096.0
    # Measured on one core of a virtual machine, for 8 to 64 ranks: pay-off, which prices one plan, takes 7 to 30 ns for
    # a count, traffic with 8 slots, which tries 19 at most, 107 to 186 ns; in kept slots, 38 at most, to 350 ns.
    trial_s_per_count: float = 1e-8
    plan_s_per_count: float = 0.0
    begin_s: float = 0.0

    def __post_init__(self) -> None:
        if self.dispatcher not in ("copies", "dedup"):
            raise ConfigError(f"dispatcher is {shown(self.dispatcher)}; expected 'copies' or 'dedup'")
        check_paths(self.paths)
        whole_number(self.prefetch, name="prefetch", least=0, most=MOST_PREFETCH, error=ConfigError)
        check_number(self.sequence_tokens, name="sequence_tokens", most=MOST_SEQUENCE, error=ConfigError)
        _check_seconds(self, MOST_S_PER_COUNT, "trial_s_per_count", "plan_s_per_count")
        _check_seconds(self, MOST_SECONDS, "begin_s")

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Parts of a planned step that the prices have at 0: planning, where nobody measured it, and votes."""
        return () if self.plan_s_per_count else ("planning", "votes") if self.begin_s == 0 else ("planning",)

    def expert_seconds(self, tokens_X: NDArray[np.integer], one: PassCost = FORWARD) -> NDArray[np.float64]:
        """Seconds of single local experts; those of a rank add up. An expert without tokens costs nothing.

        6 h i FLOPs per row, in whole tiles; all weights once through memory; (8 h + 6 i) bytes per row through
        memory to permute, activate and unpermute it (bf16). `tokens_X`, of any shape, are assignments of each expert.
        """
        of, tokens_X = self._expert_prices(one), np.asarray(tokens_X)
        # a tile that is not full takes as long, and an expert without tokens reads no weights
        tile_rows_X = -(-tokens_X // of.tile_rows) * of.tile_rows
        seconds_X: NDArray[np.float64] = tile_rows_X * of.row_s + (tokens_X > 0) * of.weight_s + tokens_X * of.pair_s
        return seconds_X

    def _expert_prices(self, one: PassCost) -> ExpertPrices:
        shape, hardware = self.model, self.hardware
        is_forward = one == FORWARD
        products = one.gemm if is_forward else hardware.backward_products
        return ExpertPrices(
            hardware.tile_rows,
            products * 2 * shape.expert_parameters / hardware.gemm_flops_per_s,
            one.weights * shape.expert_bytes / hardware.memory_bytes_per_s,
            one.memory * (8 * shape.hidden + 6 * shape.intermediate) / hardware.memory_bytes_per_s,
            hardware.replica_s if is_forward else hardware.replica_backward_s,
        )

    def step_seconds(self, hosts: Hosts, topology: Topology) -> float:
        """Seconds that a step under a plan takes once: planning, votes, publishing what ranks send in their node."""
        # planning looks at every count of a cell
        num_counts = (len(hosts.offsets) - 1) * topology.num_ranks * int(hosts.home_LE.shape[1])
        return self.begin_s + self.plan_s_per_count * num_counts + self.publish_seconds(hosts, topology)

    def publish_seconds(self, hosts: Hosts, topology: Topology) -> float:
        """Seconds of copying experts to host memory, once for a step, where ranks of a node fetch them from there."""
        if not takes_host_memory(self.paths):
            return 0.0
        sent_LE = hosts.sent_LEW(topology.ranks_per_node).any(axis=-1)
        sent_G = np.bincount(hosts.home_LE[sent_LE], minlength=topology.num_ranks)
        # where nobody measured it, writing is taken to be as fast as reading
        rate = self.hardware.publish_bytes_per_s or topology.links.host_bytes_per_s
        return int(sent_G.max()) * self.model.expert_bytes / rate

    def attention_seconds(
        self, tokens_X: NDArray[Any], squares_X: NDArray[Any] | None = None, one: PassCost = FORWARD
    ) -> NDArray[np.float64]:
        """Seconds of attention and of all that is dense in a layer, on ranks that hold these tokens, of any shape.

        2 * dense_parameters FLOPs per token, and 2 * attention_width FLOPs per square of a sequence's length (causal).
        `squares_X` are sums of squared lengths of each rank's sequences; by default those of `sequence_tokens`.
        """
        tokens_X = np.asarray(tokens_X, np.float64)
        # tokens in equal sequences of that length
        squares_X = tokens_X * self.sequence_tokens if squares_X is None else np.asarray(squares_X, np.float64)
        dense_X = one.gemm * 2 * self.model.dense_parameters * tokens_X / self.hardware.gemm_flops_per_s
        core_X = one.attention * 2 * self.model.attention_width * squares_X / self.hardware.attention_flops_per_s
        return dense_X + core_X

    @property
    def square_cost(self) -> float:
        """Seconds of one more pair of tokens of a sequence, over one more token of any, for `pack_sequences`."""
        token_s, square_s = self.attention_seconds(np.array([1, 0]), np.array([0, 1])).tolist()
        return float(square_s / token_s)

    def head_seconds(self, tokens_X: NDArray[Any]) -> NDArray[np.float64]:
        """Seconds of the output head and log-probabilities in a forward pass: 2 h V FLOPs and 10 V bytes a token."""
        hardware, vocabulary = self.hardware, self.model.vocabulary
        flops, size = 2 * self.model.hidden * vocabulary, 10 * vocabulary
        one = flops / hardware.gemm_flops_per_s + size / hardware.memory_bytes_per_s
        return np.asarray(tokens_X, np.float64) * one

    def prices(self, topology: Topology, slots: SlotSharing = "layer") -> Prices:
        """All that the kernels need of model, hardware and links, where redundant slots are shared so."""
        links, shape = topology.links, self.model
        # gradients return in a type of their own, float32 by default
        gradient_bytes = shape.expert_parameters * shape.gradient_bytes
        return Prices(
            forward=self._expert_prices(FORWARD),
            backward=self._expert_prices(BACKWARD),
            node_row_s=shape.row_bytes / links.node_bytes_per_s,
            cluster_row_s=shape.row_bytes / links.cluster_bytes_per_s,
            latency_s=links.cluster_latency_s if topology.num_nodes > 1 else links.node_latency_s,
            host_fetch_s=shape.expert_bytes / links.host_bytes_per_s,
            node_fetch_s=shape.expert_bytes / links.node_bytes_per_s,
            cluster_fetch_s=shape.expert_bytes / links.cluster_bytes_per_s,
            node_gradient_s=gradient_bytes / links.node_bytes_per_s,
            cluster_gradient_s=gradient_bytes / links.cluster_bytes_per_s,
            layer_s=self.hardware.layer_s,
            dedup=self.dispatcher == "dedup",
            top_k=shape.top_k,
            ranks_per_node=topology.ranks_per_node,
            memory_ranks=topology.ranks_per_node if takes_host_memory(self.paths) else 1,
            sweeps=_SWEEPS,
            refetches=slots == "shared",
        )


class ExpertPrices(NamedTuple):
    """Rows of a tile, and seconds of one pass: a row's products, all weights and a row through memory, a replica."""

    tile_rows: int
    row_s: float
    weight_s: float
    pair_s: float
    replica_s: float


class Prices(NamedTuple):
    """A cost model on a topology as plain numbers, for compiled code (links.hpp). Seconds, unless said."""

    # of one expert in either pass
    forward: ExpertPrices
    backward: ExpertPrices
    # one row over the rank's link inside the node, and over its NIC
    node_row_s: float
    cluster_row_s: float
    latency_s: float  # of one all-to-all
    # the weights of one expert, by where they come from
    host_fetch_s: float
    node_fetch_s: float
    cluster_fetch_s: float
    # the gradients of one expert, by where they go
    node_gradient_s: float
    cluster_gradient_s: float
    layer_s: float  # fixed, one pass
    dedup: bool  # whether a token is sent once to each node and rank
    top_k: int  # picks per token
    ranks_per_node: int  # of the topology
    memory_ranks: int  # neighbouring ranks that fetch each other's weights through host memory; 1: none do
    sweeps: NDArray[np.int64]  # [sweeps of both passes, 3]: pass, forwards, backwards
    refetches: bool  # whether each sweep of a pass fetches weights; else the first one does, and slots keep them


_TYPES: dict[Any, Any] = {int: INT, float: FLOAT, bool: BOOL, NDArray[np.int64]: ArrayOf(np.int64, 2)}
_TYPES[ExpertPrices] = StructOf(**{name: _TYPES[hint] for name, hint in get_type_hints(ExpertPrices).items()})
PRICES = StructOf(**{name: _TYPES[hint] for name, hint in get_type_hints(Prices).items()})
"""As compiled loops take them."""


def _check_seconds(owner: Hardware | CostModel, most: float, *names: str) -> None:
    """Refuse what is neither seconds, `most` at most, nor 0."""
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or value != 0:
            check_number(value, name=name, most=most, error=ConfigError)
