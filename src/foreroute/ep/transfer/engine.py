"""Replica weights by both paths, ahead of their use: the engine that carries out a plan's transfers.

    fetch(cell):  in the slots? ── no ─▶ host memory │ peers, begun a cell earlier ─▶ weights
                       └── yes ─▶ weights

Ranks hold the same records and take the same decisions without asking each other. A transfer that fails ends the step
on all of them, within the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.host_memory import DIRECTORY, HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.replica_weights import Cell, Fetch, GradientReturn, Home, cell_of, next_cell
from foreroute.ep.transfer.slots import Channels, SlotSet, SlotSets, TransferBatch, TransferLane
from foreroute.errors import ConfigError, PlanError, TransferError
from foreroute.files import blake2b_hex
from foreroute.plan import CellSchedule, ExecutionSchedule, StepPlan, Topology
from foreroute.plan.capabilities import FetchPath, check_paths
from foreroute.plan.options import SlotSharing


class TransferEngine:
    """Implements `ReplicaWeights` for the plans of one expert-parallel group.

    Public methods are collective calls, the same on all ranks in the same order, but for `close` and `take_records`.

    Args:
        homes: per routed layer, name -> [E / G, ...], this rank's shard, experts in ascending order of their id. The
            tensors that training updates; shapes and dtypes are the same on all ranks.
        topology: of the plans to come.
        options: the same on all ranks.
        peers: the ranks of the topology, in its order.

    Raises:
        TransferError: on every rank alike, when topologies, options or shapes of shards differ, or shared memory cannot
            be had.
    """

    def __init__(
        self, homes: Sequence[Mapping[str, Tensor]], topology: Topology, options: TransferOptions, peers: PeerGroup
    ) -> None:
        self._homes, self._topology, self._options, self._peers = homes, topology, options, peers
        self._consensus = RankConsensus(peers.group, timeout_s=options.timeout_s)
        _agree_on_engine(self._consensus, homes, topology, options)
        memory = None
        if options.paths != "direct":
            memory = HostMemory(self._consensus, topology, homes, directory=options.directory)
        lane = TransferLane(next(iter(homes[0].values())).device)
        self._channels = Channels(peers, memory, lane)
        self._slots = SlotSets(options.slots, 1 + options.prefetch, homes, topology)
        self._versions: list[tuple[int, ...]] = []
        self._records: list[TransferRecord] = []
        # by host memory and from peers, since the last record
        self._received_bytes = (0, 0)
        self._plan: StepPlan | None = None
        self._schedule: ExecutionSchedule | None = None
        self._step, self._updating = -1, False
        self._previous: Cell | None = None
        self._current: Cell | None = None
        self._running: SlotSet | None = None

    @property
    def paths(self) -> FetchPath:
        """Which path weights take."""
        return self._options.paths

    def publish(self) -> None:
        """Take up the weights that the home shards hold now: before the first step, and after each optimizer step.

        Replicas of the weights before are forgotten, and the shards are copied to host memory where it is used.

        Raises:
            TransferError: on every rank alike, when a rank does not follow.
        """
        for slots in self._slots:
            self._end_batch(slots)
            slots.clear()
        self._running = None
        # streams may still copy from host memory, which others write when all have come here
        self._channels.lane.synchronize()
        if self._channels.memory is not None:
            self._channels.memory.publish(self._homes)
        self._versions = [_versions(home) for home in self._homes]

    def begin_step(self, step: int, plan: StepPlan, schedule: ExecutionSchedule, *, updating: bool) -> None:
        """Put a plan in force, once for the recompute and once for the update of a step.

        Args:
            step: its number.
            plan: the same on all ranks, as the caller has made sure.
            schedule: of it, for this rank and the paths of this engine.
            updating: whether backward passes follow the forward passes; it tells what to prefetch.

        Raises:
            PlanError: when it is for other ranks, slots, layers or experts.
        """
        self._require_fitting(plan)
        for slots in self._slots:
            self._end_batch(slots)
        self._plan, self._schedule = plan, schedule
        self._step, self._updating = step, updating
        self._previous, self._current, self._running = None, None, None

    def fetch(self, cell: Cell, home: Home, *, is_recompute: bool = False) -> Fetch:
        """As in `ReplicaWeights`. Slots keep what they hold, so that `is_recompute` makes no difference.

        What it gives are views of slots, which the next filling of the slots overwrites: a backward pass that needs
        them later fetches the cell again (as `foreroute.ep` does), or is refused by autograd.
        """
        begun = time.monotonic()
        moves = self._moves(cell)
        self._require_published(cell, home)
        slots = self._running = self._slots.of(cell)
        was_prefetched = slots.cell == cell and slots.batch is not None
        self._begin(slots, cell)
        # A cell may be asked for twice, in its backward pass; the way on shows only in the last one that was another.
        if cell != self._current:
            self._previous, self._current = self._current, cell
        self._prefetch()
        begun_s = time.monotonic() - begun

        def wait() -> dict[str, Tensor]:
            begun = time.monotonic()
            self._end_batch(slots)
            exposed_s = begun_s + time.monotonic() - begun
            self._records.append(TransferRecord(cell, "fetch", *self._received_bytes, exposed_s, was_prefetched))
            self._received_bytes = (0, 0)
            return slots.replicas(moves)

        return Fetch(cell, wait)

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> GradientReturn:
        """As in `ReplicaWeights`; peer to peer."""

        def record(num_bytes: int, exposed_s: float) -> None:
            self._records.append(TransferRecord(cell, "return", 0, num_bytes, exposed_s))

        return GradientReturn(self._peers, self._moves(cell), grads, f"returning the gradients of {cell}", record)

    def take_records(self) -> list[TransferRecord]:
        """What happened on this rank since the last call, in order."""
        records, self._records = self._records, []
        return records

    def close(self, seconds: float = 10.0) -> None:
        """Wait so long for transfers under way, and give the shared memory back. Never raises: errors end here too."""
        self._channels.lane.close(seconds)
        if self._channels.memory is not None:
            self._channels.memory.close()
        self._channels = replace(self._channels, memory=None)

    def _prefetch(self) -> None:
        """Begin as many later cells as the options say, only those that replicas serve."""
        assert self._plan is not None, "a cell runs only under a plan"
        assert self._current is not None, "a cell has been fetched"
        ahead, previous, current = 0, self._previous, self._current
        # cells without replicas are passed over, at most as many as lie between a layer and itself in the backward pass
        for _ in range(2 * len(self._homes)):
            guess = next_cell(previous, current, self._plan.shape[:2], updating=self._updating)
            if guess is None or ahead == self._options.prefetch:
                return
            previous, current = current, guess
            if not self._plan.num_replicas_ML[guess.micro_step, guess.layer]:
                continue
            # the slots of the cell that runs are in use
            if (slots := self._slots.of(guess)) is not self._running:
                self._begin(slots, guess)
                ahead += 1

    def _begin(self, slots: SlotSet, cell: Cell) -> None:
        """Turn slots to a cell and start what they lack of it, unless that is under way."""
        if slots.cell != cell:
            self._end_batch(slots)
            slots.assign(cell)
        if slots.batch is not None:
            return
        assert self._plan is not None, "a cell runs only under a plan"
        plan = self._plan.cell(cell.micro_step, cell.layer)
        if slots.holds(plan):
            return
        lent, served = slots.lacking(self._moves(cell), self._peers.rank)
        what = f"fetching the replicas of {cell}"
        home = self._homes[cell.layer]
        slots.batch = TransferBatch(self._channels, lent, served, cell.layer, home, slots.tensors, what)
        slots.expect(plan, fills_mine=len(served) > 0)

    def _end_batch(self, slots: SlotSet) -> None:
        """Wait for the transfers into these slots."""
        batch, slots.batch = slots.batch, None
        if batch is None:
            return
        host_bytes, direct_bytes = self._received_bytes
        self._received_bytes = (host_bytes + batch.host_bytes, direct_bytes + batch.direct_bytes)
        batch.wait(self._options.timeout_s)

    def _moves(self, cell: Cell) -> CellSchedule:
        return cell_of(self._schedule, self._step, cell)

    def _require_fitting(self, plan: StepPlan) -> None:
        num_layers, num_experts = plan.shape[1:]
        shard_sizes = {len(shard) for home in self._homes for shard in home.values()}
        here = (len(self._homes), {size * self._topology.num_ranks for size in shard_sizes}, self._topology)
        if (num_layers, {num_experts}, plan.topology) != here:
            raise PlanError(
                f"the plan is for {num_layers} routed layers of {num_experts} experts on {plan.topology}; the engine "
                f"has {here[0]} layers of {sorted(here[1])} experts on {here[2]}. Plan for the model and topology here"
            )

    def _require_published(self, cell: Cell, home: Home) -> None:
        mine = self._homes[cell.layer]
        if {name: shard[0].data_ptr() for name, shard in home.items()} != {n: s.data_ptr() for n, s in mine.items()}:
            raise TransferError(
                f"{cell} hands in {sorted(home)}, which are not the home shards of this layer that the engine was made "
                "with; pass the same parameters, and make a new engine after replacing them"
            )
        if not self._versions or _versions(mine) != self._versions[cell.layer]:
            raise TransferError(
                f"the home shards of {cell} hold other weights than were published; call publish() before the first "
                "step and after every optimizer step or change of homes"
            )


@dataclass(frozen=True)
class TransferOptions:
    """How weights travel. The same on all ranks.

    Attributes:
        paths: "host", through host memory within a node and from peer to peer between nodes; or "direct", from peer to
            peer.
        slots: "layer": redundant slots per layer, which keep what they hold. "shared": sets of slots shared by all
            layers, one for the cell that runs and one for each that is prefetched.
        prefetch: cells ahead of the one that runs whose replicas are fetched; 0 fetches them when they are needed.
        timeout_s: a rank that does not answer for so long is taken for dead.
        directory: of node-shared memory.
    """

    paths: FetchPath = "host"
    slots: SlotSharing = "layer"
    prefetch: int = 1
    timeout_s: float = 600.0
    directory: Path = DIRECTORY

    def __post_init__(self) -> None:
        check_paths(self.paths)
        if self.slots not in ("layer", "shared"):
            raise ConfigError(f"slots is {self.slots!r}; expected 'layer' or 'shared'")
        if self.prefetch < 0:
            raise ConfigError(f"prefetch is {self.prefetch}; expected 0 cells or more")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; expected more than 0 seconds")


@dataclass(frozen=True)
class TransferRecord:
    """One call of the transfer engine on one rank.

    Attributes:
        cell: that it was for.
        kind: "fetch" of weights, or "return" of gradients.
        host_bytes: that came here through host memory and were waited for in this call, those of prefetches that were
            not asked for among them; 0 when slots held everything.
        direct_bytes: the same from peers.
        exposed_s: seconds that the host waited; the stream's waits on a GPU are not among them.
        prefetched: the transfer had begun before it was asked for.
    """

    cell: Cell
    kind: Literal["fetch", "return"]
    host_bytes: int
    direct_bytes: int
    exposed_s: float
    prefetched: bool = False


def _versions(home: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(home[name]._version for name in sorted(home))


def _agree_on_engine(
    consensus: RankConsensus, homes: Sequence[Mapping[str, Tensor]], topology: Topology, options: TransferOptions
) -> None:
    """Make sure that all ranks move the same things in the same way.

    Ranks compute alone what the others send them, so one other node size or option is enough to mix up messages.

    Args:
        consensus: of the ranks.
        homes: per routed layer, name -> [E / G, ...], of this rank.
        topology: of the plans to come.
        options: of the transfers.

    Raises:
        TransferError: on every rank alike, when topologies, options, or names, shapes or dtypes of home shards differ,
            or when there are more or fewer ranks.
    """
    settings = consensus.texts(f"{topology}, {options}", "comparing topologies and options")
    if len(set(settings)) > 1:
        raise TransferError(
            "ranks make engines of different topologies or options: "
            + "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(settings))
            + ". Every rank must be given the same"
        )
    if topology.num_ranks != consensus.size:
        raise TransferError(
            f"the topology has {topology.num_ranks} ranks, and {consensus.size} are here; describe the ranks that run"
        )
    shards = [(name, tuple(home[name].shape), str(home[name].dtype)) for home in homes for name in sorted(home)]
    listed = f"{len(homes)} layers, {sorted(set(shards))}"
    mine = f"{blake2b_hex(repr([len(homes), shards]).encode())} {listed}"
    texts = consensus.texts(mine, "comparing home shards")
    if len(set(texts)) > 1:
        raise TransferError(
            "ranks hold home shards of different shapes: "
            + "; ".join(f"rank {rank} has {text.partition(' ')[2]}" for rank, text in enumerate(texts))
            + ". Every rank must hold the same number of experts of the same model"
        )
