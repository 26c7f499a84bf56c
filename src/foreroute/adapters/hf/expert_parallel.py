"""Expert parallelism of transformers by plans: `DistributedConfig(ep_implementation="foreroute")`.

transformers shards the experts, loads and saves them, and has one `EPImplementation` per experts module bring them
their tokens. Ours leaves that to transformers' own choice ("auto") until a plan is executed. Then the schedule of the
cell knows split sizes, so that no counts are exchanged and the host does not wait for the device, and replicas compute
a part of the rows of busy experts.

N rows: tokens of this rank's batch, or assignments on their way; K picks, A = N K assignments, D hidden size,
E experts, G expert-parallel ranks, W ranks that own each expert once.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AutoEP

from foreroute.core.hooks import ModelHooks
from foreroute.core.recompute import bind
from foreroute.ep import ExpertParallelModel
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.compute import LowRankTerm, StackedReplicas, adapt
from foreroute.ep.dispatch import ExchangeRows, ReorderRows
from foreroute.ep.execution import CellWork, find_cells, work_of
from foreroute.ep.transfer.home_moves import MovingRanks, agree_on_homes, inspect_stacked, local_experts, move_layers
from foreroute.ep.transfer.segments import shard_moves
from foreroute.errors import AttachError, PlacementError, PlanError
from foreroute.layout.rank_rows import block_homes
from foreroute.plan import StepPlan

if TYPE_CHECKING:
    from foreroute.adapters.hf.routed_transformer import TransformerHooks

SITE = "_foreroute_experts"
"""Attribute in which an experts module keeps its `ForerouteEP`."""
WEIGHT = re.compile(r"(gate_up_proj|up_proj|down_proj)(_bias)?")
"""Parameters of an experts module that a replica computes with."""
REPLICA_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that replicas compute with. Those of 8 bits and less are not: their scales do not travel."""
LAYOUT = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
"""Names that transformers' `use_experts_implementation` puts on an experts module, and `foreroute.ep.compute` reads."""


def find_spread_experts(model: nn.Module, routers: Sequence[str]) -> SpreadExperts | None:
    """Find the experts of a model that was loaded with `ep_implementation="foreroute"`; None where none was."""
    # experts beside other routers, such as those of images, are left alone
    beside = tuple(path.rpartition(".")[0] + "." for path in routers)
    sites: list[tuple[str, ForerouteEP]] = [
        (path, module.__dict__[SITE])
        for path, module in model.named_modules()
        if SITE in module.__dict__ and path.startswith(beside)
    ]
    if not sites:
        return None
    if len(sites) != len(routers):
        raise AttachError(
            f"{len(routers)} routers are replayed, and {len(sites)} of their layers have experts that are spread by "
            "foreroute; spread all of them, or none"
        )
    first = sites[0][1]
    if first.spread is None:
        sizes = sorted({each.num_experts for _, each in sites})
        if len(sizes) > 1:
            raise AttachError(f"layers have {sizes} experts; expected the same number in all of them")
        layers = [each for _, each in sites]
        spread = SpreadExperts(layers, sizes[0], first.ep_mesh.get_group(), owners_of(first))
        for number, (path, layer) in enumerate(sites):
            layer.number, layer.path, layer.spread = number, path, spread
            layer.experts.register_state_dict_pre_hook(spread.require_block_homes)
            layer.experts.register_load_state_dict_pre_hook(spread.require_block_homes)
    return first.spread


def owners_of(layer: ForerouteEP) -> NDArray[np.int64]:
    """Give the global ranks that own each expert of a layer once between them, int64 [groups, G]."""
    # FSDP2 cuts the experts of a rank once more, between the groups that hold the same ones
    ranks: NDArray[np.int64] = layer.ep_mesh.mesh.numpy().reshape(1, -1)
    parameter = next(iter(layer.parameters().values()))
    if not isinstance(parameter, DTensor):
        return ranks
    mesh, coordinate = parameter.device_mesh.mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds experts"
    pairs = zip(parameter.placements, coordinate, strict=True)
    # copies of HSDP have owners of their own
    own = mesh[tuple(at if each.is_replicate() else slice(None) for each, at in pairs)]
    owners: NDArray[np.int64] = own.numpy().reshape(-1, ranks.shape[1]).astype(np.int64)
    return owners


class ForerouteEP(AutoEP):
    """Token exchange of the experts of one layer."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.num_experts: int = self.num_local_experts * ep_mesh.size()
        # position among the routed layers, path in the model, what plans are executed on: from `find_spread_experts`
        self.number, self.path = 0, ""
        self.spread: SpreadExperts | None = None
        # name -> [E / W, ...], the memory that the optimizer updates, and the parameters that it belongs to
        self.owned: Mapping[str, Tensor] = {}
        self._updated: list[nn.Parameter] = []
        self.row_E: Tensor | None = None  # int64, the row of each expert among all; None while in order of their ids
        self.wrappers: list[Any] = []  # of PEFT around the experts module, whose adapters are spread with it
        self.active: list[tuple[Any, str]] = []  # those in whose forward experts run, each with an adapter that is on
        experts.__dict__[SITE] = self

    def __call__(self, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Give every token to its experts, and add up what they return, weighted: [N, D].

        Raises:
            ReplayError: when a plan is executed, and this forward replays none of its routes.
            TransferError: when a rank or its weights cannot be reached.
        """
        hooks = None if self.spread is None else self.spread.holder
        # a backward that recomputes may run when its execution is over
        if hooks is None or (hooks.execution is None and find_cells(hooks.passes) is None):
            return self._run_unplanned(hidden_ND, ids_NK, weights_NK)
        out: Tensor = self._run_planned(hooks, hidden_ND, ids_NK, weights_NK)
        return out

    # Rows and split sizes are numbers of the host, others in every cell: traced, each would be compiled anew.
    @torch.compiler.disable
    def _run_planned(self, hooks: Any, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Run the cell of a plan. Rows that the plan does not know, such as padding, get zeros."""
        work, shape = work_of(hooks.passes, self.number, self.path), hidden_ND.shape
        # a checkpoint of experts alone, in which no router runs
        bind(hooks.passes.current, (), hooks.recomputing, until=ModelHooks.run_trunk.__code__)
        ids_NK, sent_N = ids_NK.to(torch.int64), work.cells.sent_R
        if sent_N is not None:
            hidden_ND, ids_NK, weights_NK = (each.index_select(0, sent_N) for each in (hidden_ND, ids_NK, weights_NK))
        num_rows = len(hidden_ND)
        if self.tp_mesh.size() > 1:
            hidden_ND, ids_NK, weights_NK = map(self._slice, (hidden_ND, ids_NK, weights_NK))
        out_ND = self._execute(work, hidden_ND, ids_NK, weights_NK)
        if self.tp_mesh.size() > 1:
            out_ND = DTensor.from_local(
                out_ND.contiguous(),
                self.tp_mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((num_rows, shape[1])),
                stride=(shape[1], 1),
            ).full_tensor()
        return out_ND if sent_N is None else out_ND.new_zeros(shape).index_copy(0, sent_N, out_ND)

    def _execute(self, work: CellWork, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Dispatch rows to their experts, compute, and combine, [N, D]."""
        # Rows are in the order of "all_to_all", and summed in it: without replicas the bits are its own. So this is no
        # `MoveRows` of `foreroute.ep`, with which gate weights travel: decision 0014.
        ids_A, top_k = ids_NK.reshape(-1), ids_NK.shape[1]
        rows = work.begin(ids_A.new_zeros(self.num_experts).index_add_(0, ids_A, torch.ones_like(ids_A)))
        (home, terms), replicas = self._home(), None
        if work.num_replicas is not None:
            replicas = StackedReplicas(work.cell, work.cells.engine, home, terms)
            home = dict(zip(home, replicas.register(), strict=True))

        # the assignment of each row that is sent; sorted as "all_to_all" sorts, since in another order bits may differ
        sent_A = ids_A.argsort().index_select(0, rows.send_permutation)
        group, what = self.ep_mesh.get_group(), f"rows of {work.cell}"
        arrived = ExchangeRows.apply(hidden_ND[sent_A // top_k], rows.send_G, rows.receive_G, group, what)

        if replicas is not None:
            replicas.fetch()  # behind the rows: on one communicator, what is launched first travels first
        group_N, hosts = rows.group_of_row, bool(rows.replicas.sizes)
        if hosts:
            sizes = [sum(rows.home.sizes), sum(rows.replicas.sizes)]
            in_groups = ReorderRows.apply(arrived, rows.expert_permutation, rows.return_permutation)
            (at_home, at_replicas), local_N = in_groups.split(sizes), group_N[: sizes[0]]
        else:
            # as they arrived, since the module sorts by itself; no replica is here that would read them
            at_home, at_replicas, local_N = arrived, arrived, group_N.index_select(0, rows.return_permutation)
        with self._computing_with(home, terms) if terms or replicas is not None else nullcontext():
            computed = self._compute_home(at_home, local_N)
        if replicas is not None:
            computed = replicas.compute(computed, self.experts, at_replicas, rows.replicas)
        if hosts:
            computed = ReorderRows.apply(computed, rows.return_permutation, rows.expert_permutation)

        returned = ExchangeRows.apply(computed, rows.receive_G, rows.send_G, group, what)
        picks_AD = torch.empty_like(returned).index_copy_(0, sent_A, returned)
        return (picks_AD.view(*weights_NK.shape, picks_AD.shape[1]) * weights_NK.unsqueeze(-1)).sum(dim=1)

    def _run_unplanned(self, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Leave rows to transformers' own choice."""
        ids_NK = ids_NK if self.row_E is None else self.row_E[ids_NK]
        with self._computing_with(*self._home()) if self.wrappers else nullcontext():
            out: Tensor = super().__call__(hidden_ND, ids_NK, weights_NK)
        return out

    def _slice(self, rows: Tensor) -> Tensor:
        """Give the rows of this rank, of those that the ranks of its tensor-parallel group share."""
        shared = DTensor.from_local(rows, self.tp_mesh, [Replicate()], run_check=False)
        local: Tensor = shared.redistribute(self.tp_mesh, [Shard(0)]).to_local()
        return local

    def _compute_home(self, rows_ND: Tensor, local_N: Tensor) -> Tensor:
        """Run the experts here on rows, each of which goes to one of them, int64 [N]."""
        is_empty = not len(rows_ND)
        if is_empty:  # autograd reaches the experts all the same, whose gradients FSDP2 waits for
            rows_ND, local_N = rows_ND.sum(dim=0, keepdim=True), local_N.new_zeros(1)
        out: Tensor = self.experts_forward(rows_ND, local_N.unsqueeze(-1), rows_ND.new_ones((len(rows_ND), 1)))
        return out[:0] if is_empty else out

    def _home(self) -> tuple[dict[str, Tensor], list[LowRankTerm]]:
        """Give what a pass has of the experts here, [E / G, ...] by name, and what adapters add to it."""
        home: dict[str, Tensor] = dict(self._weights())
        terms = []
        for term, pair in self._adapters():
            for name, factor in pair.items():
                home[name] = factor.gather_group() if term.scaling else factor.gather_group().detach()
            terms.append(term)
        return home, terms

    def _adapters(self) -> Iterator[tuple[LowRankTerm, dict[str, Any]]]:
        """Give what each adapter adds now, 0 times where it is off, and its factors A and B by name."""
        for wrapper in self.wrappers:
            parameter, is_transposed = wrapper.parameter_name, not wrapper._did_swap_in_out_features
            for name, factor_A in wrapper.lora_A.items():
                if hasattr(factor_A, "gather_group"):  # or it was added since, and is refused when it is switched on
                    names = f"{parameter}.{name}.A", f"{parameter}.{name}.B"
                    scaling = float(wrapper.scaling[name]) if (wrapper, name) in self.active else 0.0
                    term = LowRankTerm(parameter, names, scaling, is_transposed)
                    yield term, dict(zip(names, (factor_A, wrapper.lora_B[name]), strict=True))

    @contextmanager
    def _computing_with(self, weights: Mapping[str, Tensor], terms: Sequence[LowRankTerm]) -> Iterator[None]:
        """Replace the parameters while experts compute."""
        # no longer than that, or transformers takes these for weights that a kernel has replaced
        parameters = dict(self.experts._parameters)
        self.experts._parameters.update(
            {name: adapt(name, weights, terms) for name in self._weights()}  # type: ignore[misc]
        )
        try:
            yield
        finally:
            self.experts._parameters.update(parameters)

    # what `SpreadExperts` asks for

    def parameters(self) -> dict[str, nn.Parameter]:
        """Give what the module has now: sharded between passes, what is computed with in one. And adapters' factors."""
        return self._weights() | {name: each.weight for _, pair in self._adapters() for name, each in pair.items()}

    def _weights(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.experts._parameters.items() if each is not None}

    @property
    def slices(self) -> tuple[int, int]:
        """The number of this rank among those that share a batch, and how many they are."""
        return self.tp_mesh.get_local_rank(), self.tp_mesh.size()

    def objection_to_replicas(self) -> str | None:
        """Return what keeps its experts from being replicas on other ranks; None."""
        experts, name_of_class = self.experts, type(self.experts).__name__
        if lacking := [name for name in LAYOUT if not hasattr(experts, name)]:
            return (
                f"{self.path} is a {name_of_class}, whose layout transformers does not declare ({', '.join(lacking)})"
            )
        for name, each in self._weights().items():
            if not WEIGHT.fullmatch(name):
                return f"{self.path}.{name} is none of gate_up_proj, up_proj and down_proj, and no _bias of these"
            if each.dtype not in REPLICA_DTYPES:
                dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in REPLICA_DTYPES)
                return f"{self.path}.{name} is {each.dtype}; expected one of {dtypes}, which need no scales"
        return None

    def begin(self) -> None:
        """Find `owned` as it is now, before a plan is executed."""
        if isinstance(self.experts, FSDPModule):
            self.experts.reshard()  # a forward without a backward may have left them whole
        parameters = self.parameters()
        owned = {name: local_experts(each) for name, each in parameters.items()}
        if self.spread is not None and owned.keys() != self.owned.keys():
            self.spread.close()  # adapters have come or gone
        self.owned, self._updated = owned, list(parameters.values())

    @property
    def versions(self) -> tuple[int, ...]:
        """Writes to each of `owned`, which the memory of a DTensor does not count."""
        return tuple(each._version for each in self._updated)

    def set_homes(self, home_E: NDArray[np.int16]) -> None:
        """Take it that experts have moved to these homes, int16 [E]."""
        row_E = np.empty(len(home_E), np.int64)
        row_E[np.argsort(home_E, kind="stable")] = np.arange(len(home_E))
        is_moved = (row_E != np.arange(len(home_E))).any()
        self.row_E = torch.from_numpy(row_E).to(self.ep_mesh.device_type) if is_moved else None


class SpreadExperts(ExpertParallelModel):
    """The experts of a model that was loaded with `ep_implementation="foreroute"`, in its routed layers."""

    executor = "hf"
    holder: TransformerHooks | None

    def __init__(
        self,
        layers: Sequence[ForerouteEP],
        num_experts: int,
        group: dist.ProcessGroup,
        owner_AG: NDArray[np.int64],
    ) -> None:
        num_groups, num_ranks = owner_AG.shape
        block_home_LE = np.tile(block_homes(num_experts, num_ranks).astype(np.int16), (len(layers), 1))
        super().__init__(group, block_home_LE, [range(len(layers))], owner_AG if num_groups > 1 else None)
        self.layers = list(layers)
        self.versions_of = lambda layer: self.layers[layer].versions  # the memory of a DTensor counts no writes
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def load(self) -> dict[int, Mapping[str, Tensor]]:
        for layer in self.layers:
            layer.begin()
        return {layer.number: layer.owned for layer in self.layers}

    def make_everyone(self) -> RankConsensus | None:
        return None if self._owner_AG is None else RankConsensus(ranks=self._owner_AG.reshape(-1).tolist())

    def require_executable(self, plan: StepPlan) -> None:
        if not plan.num_replicas_ML.any():
            return
        if unequal := self._objection_to_shares():
            raise PlanError(unequal)
        if why := next(filter(None, (layer.objection_to_replicas() for layer in self.layers)), None):
            raise PlanError(f"the plan has replicas, and {why}; plan with no redundant slots, or execute None")

    def finish_gathering(self) -> None:
        pass  # shards of FSDP2, which are sent, are never stale

    def move(self, home_LE: ArrayLike, optimizer: Any) -> tuple[int, NDArray[np.int16]]:
        base, (consensus, everyone, peers, _) = getattr(optimizer, "optimizer", optimizer), self.groups
        if base is not None and base not in self._guarded:  # accelerate wraps the one that has state
            base.register_state_dict_pre_hook(self.require_block_homes)
            base.register_load_state_dict_pre_hook(self.require_block_homes)
            self._guarded.add(base)
        after_LE = agree_on_homes(everyone, self.home_LE, home_LE, consensus.size, self._objection_to_shares())
        owner_LE, next_owner_LE = self.owner_LE_at(self.home_LE), self.owner_LE_at(after_LE)
        changed = np.flatnonzero((owner_LE != next_owner_LE).any(axis=1)).tolist()
        for layer in self.layers:
            layer.begin()
        received = move_layers(
            everyone,
            MovingRanks(peers, np.arange(peers.size)[:, None]),
            [shard_moves(owner_LE[number], next_owner_LE[number]) for number in changed],
            lambda: [
                inspect_stacked(f"routed layer {number}", self.layers[number].parameters(), base) for number in changed
            ],
        )
        for layer, home_E in zip(self.layers, after_LE, strict=True):
            layer.set_homes(home_E)
        return received, after_LE

    def require_block_homes(self, *_: object) -> None:
        """Raise `PlacementError` while experts live elsewhere than the framework saves and loads them."""
        if (self.home_LE != self.block_home_LE).any():
            raise PlacementError(
                "experts have moved, and the framework saves and loads them at its own homes; call "
                "routed.move_homes(routed.block_home_LE, optimizer) before, on every rank"
            )

    def _objection_to_shares(self) -> str | None:
        """Return what keeps experts from being fetched and moved; None where every rank keeps as many."""
        num_experts = self.home_LE.shape[1]
        num_owners = self.groups.consensus.size if self._owner_AG is None else self._owner_AG.size
        if num_experts % num_owners == 0:
            return None
        return (
            f"{num_experts} experts are kept by {num_owners} ranks in shares of different sizes, and are neither "
            "fetched nor moved then; spread the model over as many ranks as divide them, or execute no plan (None)"
        )
