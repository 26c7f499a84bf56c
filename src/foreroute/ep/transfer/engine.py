"""Replica weights by both paths, ahead of their use: the engine that carries out a plan's transfers.

    fetch(cell):  in the slots? ── no ─▶ host memory │ peers, begun a cell earlier ─▶ weights
                       └── yes ─▶ weights

Ranks hold the same records and take the same decisions without asking each other. A transfer that fails ends the step
on all of them, within the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.plan_checks import require_ranks
from foreroute.ep.transfer.host_memory import DIRECTORY, HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.replica_weights import Cell, Fetch, GradientReturn, Home, device_of, next_cell
from foreroute.ep.transfer.slots import Channels, SlotSet, SlotSets, TransferBatch, TransferLane
from foreroute.errors import ConfigError, TransferError
from foreroute.files.container import blake2b_hex
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import FetchPath, check_paths
from foreroute.plan.schedule import CellSchedule, ExecutionSchedule


class TransferEngine:
    """Brings the weights of this rank's replicas, and takes their gradients home, for one expert-parallel group.

    All ranks call its methods for the same cells in the same order, those with nothing to send or receive too, but for
    `close` and `take_records`. A cell may be asked for any number of times (recomputation, backward).

    Args:
        homes: of the routed layers that run on this rank. The tensors that training updates; shapes and dtypes are the
            same on all ranks.
        options: the same on all ranks.
        peers: the ranks of the plans to come, in their order.
        consensus: of the same ranks.
        first: the number among them of the first rank of this rank's expert-parallel group.
        gathers_late: whether the weights of a layer may still be gathered from other ranks until its first cell of a
            step runs. Nothing of it is sent before.
        versions: how often the weights of a layer were written to, where their memory does not tell by itself.

    Raises:
        TransferError: on every rank alike, when options or shapes of shards differ.

    Attributes:
        updating: whether backward passes follow the forward passes of the plan in force; it tells what to prefetch.
    """

    def __init__(
        self,
        homes: Mapping[int, Home],
        options: TransferOptions,
        peers: PeerGroup,
        consensus: RankConsensus,
        *,
        first: int = 0,
        gathers_late: bool = False,
        versions: Callable[[int], tuple[int, ...]] | None = None,
    ) -> None:
        self._first = first
        self._versions_of = versions or (lambda layer: _versions(homes[layer]))
        self._homes, self._options, self._peers, self._gathers_late = homes, options, peers, gathers_late
        self._consensus = consensus
        _agree_on_engine(consensus, homes, options)
        self._channels = Channels(peers, None, TransferLane(device_of(homes)))
        self._slots: SlotSets | None = None
        self._versions: dict[int, tuple[int, ...]] = {}
        # what host memory holds of the step's weights
        self._published_LE: NDArray[np.bool_] | None = None
        self._records: list[TransferRecord] = []
        # by host memory and from peers, since the last record
        self._received_bytes = (0, 0)
        self._plan: StepPlan | None = None
        self._schedule: ExecutionSchedule | None = None
        self._of_group: ExecutionSchedule | None = None
        self._step: int | None = None
        self.updating = False
        # whose weights may be sent in the step
        self._ready: set[int] = set()
        self._previous: Cell | None = None
        self._current: Cell | None = None
        self._running: SlotSet | None = None

    @property
    def paths(self) -> FetchPath:
        """Which path weights take."""
        return self._options.paths

    def begin_step(
        self, step: int, plan: StepPlan, schedule: ExecutionSchedule, of_group: ExecutionSchedule | None = None
    ) -> None:
        """Put a plan in force, once for the recompute and once for the update of a step.

        In another step than the last one, weights are taken up as the home shards hold them now, and replicas of the
        weights before are forgotten. Where host memory is used, experts are copied to it that the plan lends within
        their node, and no plan of the step before it has lent.

        Args:
            step: its number; another one after every change of weights or homes.
            plan: the same on all ranks, as the caller has made sure. It says whether slots are shared by all layers,
                one set for the cell that runs and one for each that is prefetched, or kept for each layer.
            schedule: of it, for this rank and the paths of this engine.
            of_group: by which gradients go home, in the expert-parallel group; the same by default.

        Raises:
            PlanError: when it is for other ranks.
            TransferError: on every rank alike, when shared memory cannot be had, or a rank does not follow.
        """
        require_ranks(plan, self._peers.size)
        same_slots = self._plan is not None and (plan.slots, plan.topology) == (self._plan.slots, self._plan.topology)
        if step != self._step or not same_slots:
            self.end_step()
            # nobody may ask for those of the step before, and a run has many steps
            self._records = []
            self._slots = SlotSets(plan.slots, 1 + self._options.prefetch, self._homes, plan.topology)
            self._versions = {layer: self._versions_of(layer) for layer in self._homes}
            self._published_LE = None
        self._end_batches()
        self._publish(step, plan)
        self._plan, self._schedule, self._of_group = plan, schedule, of_group or schedule
        self._step = step
        self._ready = set() if self._gathers_late else set(self._homes)
        self._previous, self._current, self._running = None, None, None

    def end_step(self, *, keeps_weights: bool = False) -> None:
        """Wait for what is under way, and give up the slots. The next step takes up the weights that are there then.

        Args:
            keeps_weights: leave them there, for another plan of the same step.
        """
        self._end_batches()
        if keeps_weights:
            return
        # streams may still copy from host memory, which others write when all have come here
        self._channels.lane.synchronize()
        self._step, self._slots, self._running = None, None, None

    def fetch(self, cell: Cell, home: Home) -> Fetch:
        """Begin to bring the replicas that this rank serves in a cell, and behind them those of later cells.

        Called when the rows of the cell have left, so that weights travel while experts compute, and no row waits
        behind them. Nothing is waited for; what slots hold already, or is under way, is not begun again.

        What it gives are views of slots, which the next filling of the slots overwrites: a backward pass that needs
        them later fetches the cell again (as `foreroute.ep` does), or is refused by autograd.

        Args:
            cell: of the plan in force.
            home: of the layer.

        Raises:
            TransferError: when no plan of the cell is in force, its home shards hold other weights than the step began
                with, or a rank is gone.
        """
        begun = time.monotonic()
        moves = self._moves(cell)
        self._require_published(cell, home)
        self._ready.add(cell.layer)
        slots = self._running = self._slot_sets.of(cell)
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
        """Begin to return the gradients of replicas to the ranks that their experts live on, from peer to peer.

        Args:
            cell: of the plan in force.
            grads: name -> [replicas here, ...] in the order of `fetch`; not written to until they are home.

        Raises:
            TransferError: when a rank is gone.
        """

        def record(num_bytes: int, exposed_s: float) -> None:
            self._records.append(TransferRecord(cell, "return", 0, num_bytes, exposed_s))

        self._moves(cell)  # refuses a cell of no plan in force
        assert self._of_group is not None, "a plan is in force"
        moves, what = self._of_group.cell(cell.micro_step, cell.layer), f"returning the gradients of {cell}"
        return GradientReturn(self._peers, moves, grads, what, first=self._first, record=record)

    def take_records(self) -> list[TransferRecord]:
        """What happened on this rank since the last call, and since its step began, in order."""
        records, self._records = self._records, []
        return records

    def close(self, seconds: float = 10.0) -> None:
        """Wait so long for transfers under way, and give the shared memory back. Never raises: errors end here too."""
        self._channels.lane.close(seconds)
        if self._channels.memory is not None:
            self._channels.memory.close()
        self._channels.memory = None

    def _publish(self, step: int, plan: StepPlan) -> None:
        """Copy what host memory lacks, which all ranks know from the plan."""
        begun, memory = time.monotonic(), self._channels.memory
        if self._published_LE is None:
            self._published_LE = np.zeros(plan.hosts.home_LE.shape, np.bool_)
        missing_LE = plan.hosts.lent_LE(plan.topology.ranks_per_node) & ~self._published_LE
        layers = list(self._homes)
        if self._options.paths == "direct" or not missing_LE[layers].any():
            return
        if memory is None or memory.per_node != plan.topology.ranks_per_node:
            memory = HostMemory(self._consensus, plan.topology, self._homes, directory=self._options.directory)
            self._channels.memory = memory
        mine_LE = plan.hosts.home_LE == self._peers.rank
        # a shard has the experts of its rank in ascending order of their id
        rows = {layer: np.flatnonzero(missing_LE[layer][mine_LE[layer]]).tolist() for layer in layers}
        memory.publish(self._homes, rows)
        self._published_LE |= missing_LE
        self._records.append(TransferRecord(Cell(step, 0, 0), "publish", 0, 0, time.monotonic() - begun))

    def _prefetch(self) -> None:
        """Begin as many later cells as the options say, only those that replicas serve."""
        assert self._plan is not None, "a cell runs only under a plan"
        assert self._current is not None, "a cell has been fetched"
        ahead, previous, current = 0, self._previous, self._current
        # cells without replicas are passed over, at most as many as lie between a layer and itself in the backward pass
        for _ in range(2 * len(self._homes)):
            guess = next_cell(previous, current, self._homes, self._plan.shape[:2], updating=self.updating)
            if guess is None or ahead == self._options.prefetch:
                return
            previous, current = current, guess
            if not self._plan.num_replicas_ML[guess.micro_step, guess.layer]:
                continue
            if guess.layer not in self._ready:
                return
            # the slots of the cell that runs are in use
            if (slots := self._slot_sets.of(guess)) is not self._running:
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
        batch.wait(self._peers.timeout_s)

    def _end_batches(self) -> None:
        for slots in self._slots or ():
            self._end_batch(slots)

    @property
    def _slot_sets(self) -> SlotSets:
        assert self._slots is not None, "a cell runs only under a plan"
        return self._slots

    def _moves(self, cell: Cell) -> CellSchedule:
        if self._schedule is None or cell.step != self._step:
            in_force = "none is" if self._step is None else f"that of step {self._step} is"
            raise TransferError(
                f"{cell} is asked for, but no plan of that step is in force, {in_force}; run forward and backward "
                "inside of execute()"
            )
        return self._schedule.cell(cell.micro_step, cell.layer)

    def _require_published(self, cell: Cell, home: Home) -> None:
        mine = self._homes[cell.layer]
        if {name: its[0].data_ptr() for name, its in home.items()} != {n: its[0].data_ptr() for n, its in mine.items()}:
            raise TransferError(
                f"{cell} hands in {sorted(home)}, which are not the home shards of this layer that the engine was made "
                "with; pass the same parameters, and make a new engine after replacing them"
            )
        if self._versions_of(cell.layer) != self._versions[cell.layer]:
            raise TransferError(
                f"the home shards of {cell} hold other weights than its step began with; execute "
                "under another step after every optimizer step or change of homes"
            )


@dataclass(frozen=True)
class TransferOptions:
    """How weights travel. The same on all ranks.

    Attributes:
        paths: "host", through host memory within a node and from peer to peer between nodes; or "direct", from peer to
            peer.
        prefetch: cells ahead of the one that runs whose replicas are fetched; 0 fetches them when they are needed.
        directory: of node-shared memory.
    """

    paths: FetchPath = "host"
    prefetch: int = 1
    directory: Path = DIRECTORY

    def __post_init__(self) -> None:
        check_paths(self.paths)
        if self.prefetch < 0:
            raise ConfigError(f"prefetch is {self.prefetch}; expected 0 cells or more")


@dataclass(frozen=True)
class TransferRecord:
    """One call of the transfer engine on one rank.

    Attributes:
        cell: that it was for; the first of its step where weights are published.
        kind: "publish" as a step begins, "fetch" of weights, or "return" of gradients.
        host_bytes: that came here through host memory and were waited for in this call, those of prefetches that were
            not asked for among them; 0 when slots held everything.
        direct_bytes: the same from peers.
        exposed_s: seconds that the host waited; the stream's waits on a GPU are not among them.
        prefetched: the transfer had begun before it was asked for.
    """

    cell: Cell
    kind: Literal["publish", "fetch", "return"]
    host_bytes: int
    direct_bytes: int
    exposed_s: float
    prefetched: bool = False


def _versions(home: Home) -> tuple[int, ...]:
    return tuple(
        tensor._version
        for _, experts in sorted(home.items())
        for tensor in ([experts] if isinstance(experts, Tensor) else experts)
    )


def _agree_on_engine(consensus: RankConsensus, homes: Mapping[int, Home], options: TransferOptions) -> None:
    """Make sure that all ranks move the same things in the same way.

    Ranks compute alone what the others send them, so one other option is enough to mix up messages.

    Args:
        consensus: of the ranks.
        homes: of the routed layers here.
        options: of the transfers.

    Raises:
        TransferError: on every rank alike, when options, or layers, names, shapes or dtypes of home shards differ.
    """
    settings = consensus.texts(str(options), "comparing options of transfers")
    if len(set(settings)) > 1:
        raise TransferError(
            "ranks make engines of different options: "
            + "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(settings))
            + ". Every rank must be given the same"
        )
    shards = [
        (layer, name, (len(home[name]), *home[name][0].shape), str(home[name][0].dtype))
        for layer, home in homes.items()
        for name in sorted(home)
    ]
    listed = f"{len(homes)} layers, {sorted({shard[1:] for shard in shards})}"
    mine = f"{blake2b_hex(repr(shards).encode())} {listed}"
    texts = consensus.texts(mine, "comparing home shards")
    if len(set(texts)) > 1:
        raise TransferError(
            "ranks hold home shards of different shapes: "
            + "; ".join(f"rank {rank} has {text.partition(' ')[2]}" for rank, text in enumerate(texts))
            + ". Every rank must hold the same number of experts of the same model"
        )
