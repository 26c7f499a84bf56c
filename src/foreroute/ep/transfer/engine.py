"""Replica weights by both paths, ahead of their use, with deadlines: the engine that carries out a plan's transfers.

    fetch(cell):  in the slots? ── no ─▶ host memory │ peers, begun a cell earlier ─▶ here and whole on all ranks?
                       └── yes ─▶ weights ◀── yes ──────────────────────────────────────┴─ no ─▶ served at home

Ranks hold the same books and take the same decisions without asking each other, with one exception: whether a cell's
replicas arrived is put to the vote where a deadline or checksums are in force (docs/decisions, "Votes at the cell").
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import xxhash
from torch import Tensor

from foreroute.ep.transfer.burst import Burst, Channels
from foreroute.ep.transfer.cell import Cell, next_cell
from foreroute.ep.transfer.consensus import Votes, agree_on_plan
from foreroute.ep.transfer.direct import GradientReturn, RepeatedReturn, cell_of
from foreroute.ep.transfer.host_memory import HostMemory
from foreroute.ep.transfer.moves import choose_host_V, replica_moves, without_replicas
from foreroute.ep.transfer.options import TransferOptions, TransferRecord
from foreroute.ep.transfer.peers import ATTEMPTS, PeerGroup
from foreroute.ep.transfer.slots import SlotSet, SlotSets
from foreroute.errors import PlanError, TransferError
from foreroute.plan import CellPlan, StepPlan, Topology


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
        self._votes = Votes(peers.group, timeout_s=options.timeout_s)
        _agree_on_engine(self._votes, homes, topology, options)
        memory = None
        if options.paths != "direct":
            memory = HostMemory(self._votes, topology, homes, directory=options.directory, checksums=options.checksums)
        self._channels = Channels(peers, memory, options.checksums)
        self._slots = SlotSets(options.slots, 1 + options.prefetch, homes, topology)
        self._versions: list[tuple[int, ...]] = []
        self._abandoned: list[Burst] = []
        self._records: list[TransferRecord] = []
        # by host memory and from peers, since the last record
        self._settled_bytes = (0, 0)
        self._plan: StepPlan | None = None
        self._in_force, self._updating = (-1, ""), False
        self._previous: Cell | None = None
        self._current: Cell | None = None
        self._running: SlotSet | None = None
        self._served: set[Cell] = set()
        self._at_home: dict[Cell, str] = {}

    def publish(self) -> None:
        """Take up the weights that the home shards hold now: before the first step, and after each optimizer step.

        Replicas of the weights before are forgotten, and the shards are copied to host memory where it is used.

        Raises:
            TransferError: on every rank alike, when a rank does not follow.
        """
        for slots in self._slots:
            self._settle(slots, self._patience_s)
            slots.forget()
        self._running = None
        if self._channels.memory is not None:
            self._channels.memory.publish(self._homes, self._options.timeout_s)
        self._versions = [_versions(home) for home in self._homes]

    def begin_step(self, step: int, plan: StepPlan, *, updating: bool, digest: str | None = None) -> None:
        """Put a plan in force, once for the recompute and once for the update of a step.

        A cell that fell back to its homes in the recompute keeps them in the update of the same step.

        Args:
            step: its number.
            plan: the same on all ranks.
            updating: whether backward passes follow the forward passes; it tells what to prefetch.
            digest: of the plan, from a caller who has made sure that all ranks hold it, as `ExpertParallelModel` does;
                None to ask them here.

        Raises:
            PlanError: on every rank alike, when plans differ, or are for other ranks, slots, layers or experts.
            TransferError: when a rank does not answer.
        """
        digest = agree_on_plan(self._votes, step, plan) if digest is None else digest
        self._require_fitting(plan)
        for slots in self._slots:
            self._settle(slots, self._patience_s)
        if (step, digest) != self._in_force:
            self._served, self._at_home = set(), {}
        self._plan, self._in_force, self._updating = plan, (step, digest), updating
        self._previous, self._current, self._running = None, None, None

    def fetch(self, cell: Cell, home: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """As in `ReplicaWeights`; starts the transfers of the cells after it.

        Views of slots, which the next filling of the slots overwrites: a backward pass that needs them later fetches
        the cell again (as `foreroute.ep` does), or is refused by autograd.
        """
        begun = time.monotonic()
        plan = self._cell_plan(cell)
        self._require_published(cell, home)
        was_prefetched = False
        if cell not in self._at_home:
            slots = self._running = self._slots.of(cell)
            was_prefetched = slots.cell == cell and slots.burst is not None
            self._begin(slots, cell)
            self._finish(slots, cell)
        exposed_s = time.monotonic() - begun
        because = self._at_home.get(cell)
        self._records.append(TransferRecord(cell, "fetch", *self._settled_bytes, exposed_s, was_prefetched, because))
        self._settled_bytes = (0, 0)
        if cell != self._current:
            self._previous, self._current = self._current, cell
        self._prefetch(cell)
        return None if because is not None else slots.replicas(plan, self._peers.rank)

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> RepeatedReturn:
        """As in `ReplicaWeights`; peer to peer."""
        plan = self._cell_plan(cell)
        if cell in self._at_home:
            plan = without_replicas(plan)
        what, checksums = f"returning the gradients of {cell}", self._options.checksums

        def begin() -> GradientReturn:
            return GradientReturn(self._peers, plan, grads, what, checksums=checksums)

        def record(num_bytes: int, exposed_s: float) -> None:
            self._records.append(TransferRecord(cell, "return", 0, num_bytes, exposed_s))

        return RepeatedReturn(begin, self._votes if checksums else None, what, record)

    def take_records(self) -> list[TransferRecord]:
        """What happened on this rank since the last call, in order."""
        records, self._records = self._records, []
        return records

    def close(self, seconds: float = 10.0) -> None:
        """Wait so long for transfers under way, and give the shared memory back. Never raises: errors end here too."""
        end = time.monotonic() + seconds
        for burst in [*self._abandoned, *(s.burst for s in self._slots if s.burst is not None)]:
            burst.end(max(0.0, end - time.monotonic()))
        self._abandoned = []
        if self._channels.memory is not None:
            self._channels.memory.close()
        self._channels = Channels(self._peers, None, self._options.checksums)

    @property
    def _patience_s(self) -> float:
        deadline_s = self._options.deadline_s
        return self._options.timeout_s if deadline_s is None else deadline_s

    def _begin(self, slots: SlotSet, cell: Cell) -> None:
        """Turn slots to a cell and start what they lack of it, unless that is under way."""
        if slots.cell != cell:
            self._settle(slots, self._patience_s)
            slots.turn_to(cell)
        if slots.burst is not None:
            return
        moves = replica_moves(self._cell_plan(cell), slots.held_GP)
        if not len(moves):
            return
        row_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in slots.tensors.values())
        paths = "direct" if self._channels.memory is None else self._options.paths
        host_V = choose_host_V(moves, row_bytes, self._topology, paths)
        what = f"fetching the replicas of {cell}"
        home = self._homes[cell.layer]
        try:
            slots.burst = Burst(self._channels, moves, host_V, cell.layer, home, slots.tensors, what)
        except BaseException:
            slots.renew()  # receipts that were posted may still fill the buffers
            raise
        slots.expect(moves, self._peers.rank)

    def _finish(self, slots: SlotSet, cell: Cell) -> None:
        """Wait for the replicas of a cell, and decide on all ranks alike who serves it."""
        if cell not in self._served:
            if objections := self._settle(slots, self._patience_s):
                self._at_home[cell] = "; ".join(objections)
            else:
                self._served.add(cell)
            return
        # tokens have been sent to these replicas: a backward pass or a recomputation cannot do without them
        for _ in range(ATTEMPTS):
            self._begin(slots, cell)
            if not (objections := self._settle(slots, self._options.timeout_s)):
                return
        raise TransferError(f"fetching the replicas of {cell} failed {ATTEMPTS} times: " + "; ".join(objections))

    def _settle(self, slots: SlotSet, patience_s: float) -> list[str]:
        """Wait for the transfers into these slots; after an objection of any rank, all take them for empty."""
        burst, slots.burst = slots.burst, None
        if burst is None:
            return []
        host_bytes, direct_bytes = self._settled_bytes
        self._settled_bytes = (host_bytes + burst.host_bytes, direct_bytes + burst.direct_bytes)
        objection = burst.wait(patience_s)
        if not self._options.votes:
            if objection is not None:
                raise TransferError(f"{burst.what}: rank {self._peers.rank}: {objection}")
            return []
        objections = self._votes.objections(objection, burst.what)
        if objections:
            slots.renew()
            self._abandoned = [b for b in self._abandoned if not b.is_over] + [burst]
        return objections

    def _prefetch(self, cell: Cell) -> None:
        """Begin the transfers of the next cells that replicas serve."""
        assert self._plan is not None, "a cell runs only under a plan"
        ahead, previous, current = 0, self._previous, cell
        # as far as from a layer around the turn and back to it
        for _ in range(2 * len(self._homes)):
            guess = next_cell(previous, current, self._plan.shape[:2], updating=self._updating)
            if guess is None or ahead == self._options.prefetch:
                return
            previous, current = current, guess
            if guess in self._at_home or not len(self._cell_plan(guess).expert_R):
                continue
            # the slots of the cell that runs are in use
            if (slots := self._slots.of(guess)) is not self._running:
                self._begin(slots, guess)
                ahead += 1

    def _cell_plan(self, cell: Cell) -> CellPlan:
        return cell_of(self._plan, self._in_force[0], cell)

    def _require_fitting(self, plan: StepPlan) -> None:
        num_layers, num_experts = plan.shape[1:]
        shard_sizes = {len(shard) for home in self._homes for shard in home.values()}
        here = (len(self._homes), {size * self._topology.num_ranks for size in shard_sizes}, self._topology)
        if (num_layers, {num_experts}, plan.topology) != here:
            raise PlanError(
                f"the plan is for {num_layers} routed layers of {num_experts} experts on {plan.topology}; the engine "
                f"has {here[0]} layers of {sorted(here[1])} experts on {here[2]}. Plan for the model and topology here"
            )

    def _require_published(self, cell: Cell, home: Mapping[str, Tensor]) -> None:
        mine = self._homes[cell.layer]
        if {name: shard.data_ptr() for name, shard in home.items()} != {n: s.data_ptr() for n, s in mine.items()}:
            raise TransferError(
                f"{cell} hands in {sorted(home)}, which are not the home shards of this layer that the engine was made "
                "with; pass the same parameters, and make a new engine after replacing them"
            )
        if not self._versions or _versions(mine) != self._versions[cell.layer]:
            raise TransferError(
                f"the home shards of {cell} hold other weights than were published; call publish() before the first "
                "step and after every optimizer step or change of homes"
            )


def _versions(home: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(home[name]._version for name in sorted(home))


def _agree_on_engine(
    votes: Votes, homes: Sequence[Mapping[str, Tensor]], topology: Topology, options: TransferOptions
) -> None:
    """Make sure that all ranks move the same things in the same way.

    Ranks compute alone what the others send them, so one other bandwidth or option is enough to mix up messages.

    Args:
        votes: of the ranks.
        homes: per routed layer, name -> [E / G, ...], of this rank.
        topology: of the plans to come.
        options: of the transfers.

    Raises:
        TransferError: on every rank alike, when topologies, options, or names, shapes or dtypes of home shards differ,
            or when there are more or fewer ranks.
    """
    settings = votes.texts(f"{topology}, {options}", "comparing topologies and options")
    if len(set(settings)) > 1:
        raise TransferError(
            "ranks make engines of different topologies or options: "
            + "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(settings))
            + ". Every rank must be given the same"
        )
    if topology.num_ranks != votes.size:
        raise TransferError(
            f"the topology has {topology.num_ranks} ranks, and {votes.size} are here; describe the ranks that run"
        )
    shards = [(name, tuple(home[name].shape), str(home[name].dtype)) for home in homes for name in sorted(home)]
    listed = f"{len(homes)} layers, {sorted(set(shards))}"
    mine = f"{xxhash.xxh3_64_hexdigest(repr([len(homes), shards]).encode())} {listed}"
    texts = votes.texts(mine, "comparing home shards")
    if len(set(texts)) > 1:
        raise TransferError(
            "ranks hold home shards of different shapes: "
            + "; ".join(f"rank {rank} has {text.partition(' ')[2]}" for rank, text in enumerate(texts))
            + ". Every rank must hold the same number of experts of the same model"
        )
