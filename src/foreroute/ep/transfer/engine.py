"""Replica weights by both paths, ahead of their use: the engine that carries out a plan's transfers.

    fetch(cell):  in the slots? ── no ─▶ host memory │ peers, begun a cell earlier ─▶ wait_weights(cell)
                       └── yes ─▶ wait_weights(cell)

Ranks hold the same records and take the same decisions without asking each other. A transfer that fails ends the step
on all of them, within the timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.plan_checks import require_ranks
from foreroute.ep.transfer.cells import Cell, Home, device_of, next_cell
from foreroute.ep.transfer.gradients import GradientReturn
from foreroute.ep.transfer.host_memory import DIRECTORY, HostMemory, shapes_of
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.slots import SlotSet
from foreroute.ep.transfer.transfers import Transfer, TransferLane, row_messages
from foreroute.errors import ConfigError, TransferError
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import FetchPath, check_paths, takes_host_memory
from foreroute.plan.schedule import CellSchedule, ExecutionSchedule


class TransferEngine:
    """Brings the weights of this rank's replicas, and returns their gradients, for one expert-parallel group.

    All ranks call its methods for the same cells in the same order, those with nothing to send or receive too, but for
    `close` and `take_records`. A cell may be asked for any number of times (recomputation, backward).
    """

    def __init__(
        self,
        homes: Mapping[int, Home],  # the tensors that training updates
        options: TransferOptions,
        peers: PeerGroup,  # the ranks of the plans to come, in their order
        consensus: RankConsensus,  # the same ranks in the same order
        *,
        first: int = 0,  # the number among them of the first rank of this expert-parallel group
        gathers_late: bool = False,  # the weights of a layer are stale until its first cell of a step runs
        versions: Callable[[int], tuple[int, ...]] | None = None,  # of a layer, where their memory does not count
    ) -> None:
        self._homes, self.options, self._peers, self._consensus = homes, options, peers, consensus
        self._first, self._gathers_late = first, gathers_late
        self._versions_of = versions or (lambda layer: _versions(homes[layer]))
        self._rows: dict[int, dict[str, Sequence[Tensor]]] = {}  # of each layer's `homes`
        _require_same_engines(consensus, homes, options)
        peers.connect(device_of(homes))
        self._lane = TransferLane(device_of(homes))
        self._memory: HostMemory | None = None
        # sets of slots of layers that share them, the one used last at the end; made when they are first needed
        self._rings: dict[object, list[SlotSet]] = {}
        self._ring_keys: dict[int, object] = {}  # by layer
        self._versions: dict[int, tuple[int, ...]] = {}
        self._records: list[TransferRecord] = []
        # by host memory and from peers, waited for since the last record
        self._received_bytes = (0, 0)
        self._exposed_s = 0.0
        self._plan: StepPlan | None = None
        self._fetch_schedule: ExecutionSchedule | None = None
        self._group_schedule: ExecutionSchedule | None = None
        self._step: int | None = None
        self.expects_backward = False  # behind the forward passes of the plan, which tells what to prefetch
        # layers whose weights may be sent in the step
        self._ready: set[int] = set()
        self._previous: Cell | None = None
        self._current: Cell | None = None
        self._running: SlotSet | None = None

    def begin_step(
        self,
        step: int,
        plan: StepPlan,
        fetch_schedule: ExecutionSchedule,  # of `plan`, for this rank
        group_schedule: ExecutionSchedule | None = None,  # by which gradients are returned, where another plan says it
    ) -> None:
        """Activate a plan that is the same on all ranks.

        In another step than the last one, weights are those that the home shards hold now, and replicas of the weights
        before are forgotten. A step has another number after every change of weights or homes.
        """
        require_ranks(plan, self._peers.size)
        same_slots = self._plan is not None and (plan.slots, plan.topology) == (self._plan.slots, self._plan.topology)
        if step != self._step or not same_slots:
            self.end_step()
            # nobody may ask for those of the step before, and a run has many steps
            self._records = []
            self._ring_keys = {n: n if plan.slots == "layer" else shapes_of(home) for n, home in self._homes.items()}
            self._rings = {key: [] for key in self._ring_keys.values()}
            self._versions = {layer: self._versions_of(layer) for layer in self._homes}
            if self._memory is not None:
                self._memory.forget()
        self._end_transfers()
        if takes_host_memory(self.options.paths):
            self._publish(step, plan)
        self._plan, self._fetch_schedule = plan, fetch_schedule
        self._group_schedule = group_schedule or fetch_schedule
        self._step = step
        self._ready = set() if self._gathers_late else set(self._homes)
        # anew in each plan, as frameworks may have moved what a parameter refers to
        self._rows = {layer: {n: _rows_of(each) for n, each in home.items()} for layer, home in self._homes.items()}
        self._previous, self._current, self._running = None, None, None

    def require_same_memory(self, homes: Mapping[int, Home]) -> None:
        """Raise `TransferError` unless home experts are still where this was made for."""
        for layer, home in homes.items():
            if _addresses(home) != _addresses(self._homes[layer]):
                raise TransferError(
                    f"{', '.join(sorted(home))} of routed layer {layer} are not the home shards that weights were sent "
                    "from in earlier executions; after parameters were replaced, call close() of the model on every "
                    "rank, and the next execution begins with the new ones"
                )

    def end_step(self, *, keeps_weights: bool = False) -> None:
        """Wait for what is under way, and release the slots, unless another plan of the same step keeps the weights."""
        self._end_transfers()
        if keeps_weights:
            return
        # streams may still copy from host memory, which others write when all have come here
        if self._lane.stream is not None:
            self._lane.stream.synchronize()
        self._step, self._running, self._rings = None, None, {}

    def fetch(self, cell: Cell) -> None:
        """Begin to bring the replicas that this rank hosts in a cell, and behind them those of later cells."""
        # Called when the rows of the cell have left, so that weights travel while experts compute, and no row waits
        # behind them. What slots hold already, or is under way, is not begun again.
        begun = time.monotonic()
        self._require_active(cell)
        self._require_published(cell)
        self._ready.add(cell.layer)
        slots = self._running = self._slots_for(cell)
        slots.was_prefetched = slots.cell == cell and slots.transfer is not None
        self._begin(slots, cell)
        # A cell may be asked for twice, in its backward pass; the way on shows only in the last one that was another.
        if cell != self._current:
            self._previous, self._current = self._current, cell
        self._prefetch()
        self._exposed_s += time.monotonic() - begun

    def wait_weights(self, cell: Cell) -> dict[str, Tensor]:
        """Wait for the weights of a cell that was fetched: name -> [V here, ...] in ascending order of slot."""
        # They are views of slots, which the next filling overwrites. A backward pass that needs them later fetches the
        # cell again, or is refused by autograd.
        begun = time.monotonic()
        moves = self._require_active(cell)
        slots = next((each for each in self._rings[self._ring_keys[cell.layer]] if each.cell == cell), None)
        assert slots is not None, "a cell is fetched before its weights are waited for"
        self._end_transfer(slots)
        exposed_s = self._exposed_s + time.monotonic() - begun
        self._records.append(TransferRecord(cell, "fetch", *self._received_bytes, exposed_s, slots.was_prefetched))
        self._received_bytes, self._exposed_s = (0, 0), 0.0
        return slots.replicas(moves)

    def return_grads(self, cell: Cell, grads: Mapping[str, Tensor]) -> GradientReturn:
        """Begin to return gradients, in the order of `wait_weights`, to the ranks that their experts live on."""

        def record(num_bytes: int, exposed_s: float) -> None:
            self._records.append(TransferRecord(cell, "return", 0, num_bytes, exposed_s))

        self._require_active(cell)
        assert self._group_schedule is not None, "a plan is active"
        moves, what = self._group_schedule.cell(cell.micro_step, cell.layer), f"returning the gradients of {cell}"
        return GradientReturn(self._peers, moves, grads, what, first=self._first, record=record)

    def take_records(self) -> list[TransferRecord]:
        """Take what happened on this rank since the last call, and since its step began, in order."""
        records, self._records = self._records, []
        return records

    def close(self, seconds: float = 10.0) -> None:
        """Wait so long for transfers under way, and give the shared memory back. Never raises: errors end here too."""
        is_drained = self._lane.close(seconds)
        # memory that a stream may still read stays page-locked until the process ends
        if self._memory is not None and is_drained:
            self._memory.close()
        self._memory = None

    def _publish(self, step: int, plan: StepPlan) -> None:
        """Copy what host memory lacks, which all ranks know from the plan."""
        begun, hosts, per_node = time.monotonic(), plan.hosts, plan.topology.ranks_per_node
        if self._memory is None or self._memory.per_node != per_node:
            self._memory = HostMemory(self._consensus, self._homes, per_node, directory=self.options.shared_memory)
        if self._memory.publish(hosts.home_LE, hosts.sent_LEW(per_node)):
            self._records.append(TransferRecord(Cell(step, 0, 0), "publish", 0, 0, time.monotonic() - begun))

    def _prefetch(self) -> None:
        """Begin as many later cells as the options say, only those that replicas serve."""
        assert self._plan is not None, "a cell runs only under a plan"
        assert self._current is not None, "a cell has been fetched"
        ahead, previous, current = 0, self._previous, self._current
        # cells without replicas are passed over, at most as many as lie between a layer and itself in the backward pass
        for _ in range(2 * len(self._homes)):
            guess = next_cell(previous, current, self._homes, self._plan.shape[:2], updating=self.expects_backward)
            if guess is None or ahead == self.options.prefetch:
                return
            previous, current = current, guess
            if not self._plan.num_replicas_ML[guess.micro_step, guess.layer]:
                continue
            if guess.layer not in self._ready:
                return
            # the slots of the cell that runs are in use
            if (slots := self._slots_for(guess)) is not self._running:
                self._begin(slots, guess)
                ahead += 1

    def _begin(self, slots: SlotSet, cell: Cell) -> None:
        """Turn slots to a cell and post what they lack of it, unless that is under way."""
        if slots.cell != cell:
            self._end_transfer(slots)
            slots.assign(cell)
        if slots.transfer is not None:
            return
        assert self._plan is not None, "a cell runs only under a plan"
        plan = self._plan.cell(cell.micro_step, cell.layer)
        if slots.holds(plan):
            return
        sends, hosted = slots.lacking(self._require_active(cell), self._peers.rank)
        received, by_host = hosted[~hosted["by_host"]], hosted[hosted["by_host"]]
        copies = []
        for expert, slot in zip(by_host["expert"].tolist(), by_host["slot"].tolist(), strict=True):
            assert self._memory is not None, "a schedule of the host path has published its experts"
            for name, source in self._memory.expert(cell.layer, expert).items():
                copies.append((source, slots.rows[name][slot]))
        slots.transfer = Transfer(
            self._peers,
            f"fetching the replicas of {cell}",
            row_messages(sends[~sends["by_host"]], "row", self._rows[cell.layer]),
            row_messages(received, "slot", slots.rows),
            copies,
            self._lane,
        ).post()
        slots.enter(plan, fills_mine=len(hosted) > 0)

    def _end_transfer(self, slots: SlotSet) -> None:
        """Wait for the transfer into these slots."""
        transfer, slots.transfer = slots.transfer, None
        if transfer is None:
            return
        host_bytes, direct_bytes = self._received_bytes
        self._received_bytes = (host_bytes + transfer.host_bytes, direct_bytes + transfer.direct_bytes)
        transfer.wait()

    def _end_transfers(self) -> None:
        for ring in self._rings.values():
            for slots in ring:
                self._end_transfer(slots)

    def _slots_for(self, cell: Cell) -> SlotSet:
        """Return the set of this cell, or the one to be given to it: a new one, or the one used longest ago."""
        assert self._plan is not None, "a cell runs only under a plan"
        ring = self._rings[self._ring_keys[cell.layer]]
        num_sets = 1 if self._plan.slots == "layer" else 1 + self.options.prefetch
        found = next((slots for slots in ring if slots.cell == cell), None)
        if found is None and len(ring) < num_sets:
            found = SlotSet(self._homes[cell.layer], self._plan.topology)
        elif found is None:
            found = ring.pop(0)
        else:
            ring.remove(found)
        ring.append(found)
        return found

    def _require_active(self, cell: Cell) -> CellSchedule:
        """Return the moves of weights in a cell; raise `TransferError` for one of no active plan."""
        if self._fetch_schedule is None or cell.step != self._step:
            active = "none is" if self._step is None else f"that of step {self._step} is"
            raise TransferError(
                f"{cell} is asked for, but no plan of that step is active, {active}; run forward and backward "
                "inside of execute()"
            )
        return self._fetch_schedule.cell(cell.micro_step, cell.layer)

    def _require_published(self, cell: Cell) -> None:
        if self._versions_of(cell.layer) != self._versions[cell.layer]:
            raise TransferError(
                f"the home shards of {cell} hold other weights than its step began with; execute "
                "under another step after every optimizer step or change of homes"
            )


@dataclass(frozen=True)
class TransferOptions:
    """Options of how weights travel. The same on all ranks.

    Attributes:
        paths: "direct", from peer to peer; or "host", through host memory within a node.
        prefetch: cells ahead of the one that runs whose replicas are fetched; 0 fetches them when they are needed.
        shared_memory: the folder whose files the ranks of a node share; any folder of the node works.
    """

    paths: FetchPath = "direct"
    prefetch: int = 1
    shared_memory: Path = DIRECTORY

    def __post_init__(self) -> None:
        check_paths(self.paths)
        if self.prefetch < 0:
            raise ConfigError(f"prefetch is {self.prefetch}; expected 0 cells or more")


@dataclass(frozen=True)
class TransferRecord:
    """One call of the transfer engine on one rank."""

    cell: Cell  # the first of its step where weights are published
    operation: Literal["publish", "fetch", "return"]  # as a step begins, of weights, of gradients
    host_bytes: int  # that came by host memory and were waited for, those of prefetches that nobody asked for too
    direct_bytes: int  # the same from peers
    exposed_s: float  # seconds that the host waited; the stream's waits on a GPU are not among them
    prefetched: bool = False  # the transfer had begun before it was asked for


def _rows_of(experts: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return experts.detach().unbind() if isinstance(experts, Tensor) else [each.detach() for each in experts]


def _tensors_of(home: Home) -> list[tuple[str, Tensor]]:
    return [
        (name, tensor)
        for name, experts in sorted(home.items())
        for tensor in ([experts] if isinstance(experts, Tensor) else experts)
    ]


def _versions(home: Home) -> tuple[int, ...]:
    return tuple(tensor._version for _, tensor in _tensors_of(home))


def _addresses(home: Home) -> list[tuple[str, int]]:
    return [(name, tensor.data_ptr()) for name, tensor in _tensors_of(home)]


def _require_same_engines(consensus: RankConsensus, homes: Mapping[int, Home], options: TransferOptions) -> None:
    """Raise `TransferError` on every rank alike, when options, or layers, names, shapes or dtypes of shards differ."""
    shards = [
        (layer, name, (len(home[name]), *home[name][0].shape), str(home[name][0].dtype))
        for layer, home in homes.items()
        for name in sorted(home)
    ]
    # Ranks compute alone what the others send them, so one other option is enough to mix up messages.
    with consensus.agree("making the engine of transfers", TransferError) as vote:
        vote.same(str(options), "ranks make engines of different options: {}. Every rank must be given the same")
        vote.same(
            f"{len(homes)} layers, {sorted({shard[1:] for shard in shards})}, in all {shards}",
            "ranks hold home shards of different shapes: {}. Every rank must hold the same number of experts of the "
            "same model",
        )
