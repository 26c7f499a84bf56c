"""Memory of a spread model in a micro-step, from a few small ones: the input of memory forecasts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.adapters.hf.routed_transformer import RoutedTransformer
from foreroute.costs.memory import WORKS, BatchSizes, StepMemory, Work, describe_section, section_sizes
from foreroute.ep.allocations import AllocationLog
from foreroute.errors import ForecastError
from foreroute.plan import Links, StepPlan, Topology, known_rows
from foreroute.plan.counts import counts_digest
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.trace import LayerKind, RoutingSpec, RoutingTrace

MICRO_STEPS = 41
"""The first makes what the others share, of which a rank has ten or more of each `Work`, for nine coefficients."""
TRIES = 4
SLOTS = 2
LENGTHS = range(8, 64)


def draw_micro_batches(spec: RoutingSpec, vocabulary: int, *, seed: int = 0) -> list[RoutingTrace]:
    """Draw small micro-batches of two sequences, one of them padded, whose routes favour some experts of each layer."""
    rng = np.random.default_rng([seed, dist.get_rank()])
    # layers that look experts up by tokens have no routes of their own
    spec = spec.select(layer for layer in spec.layers if layer.kind is not LayerKind.HASH)
    found = []
    for _ in range(MICRO_STEPS):
        lengths = rng.choice(LENGTHS, 2, replace=False)
        favour_LE = 2.0 * rng.standard_normal((spec.num_layers, spec.num_experts))
        scores = [favour_LE + rng.gumbel(size=(length, spec.num_layers, spec.num_experts)) for length in lengths]
        ids = [np.argsort(-score, axis=-1)[..., : spec.top_k] for score in scores]
        found.append(RoutingTrace.from_sequences(spec, [rng.integers(vocabulary, size=n) for n in lengths], ids))
    return found


def measure_memory(
    routed: RoutedTransformer,
    traces: Sequence[RoutingTrace],
    targets_M: Sequence[int],
    compute_loss: Callable[[int], Tensor],
    topology: Topology | None = None,
) -> StepMemory:
    """Run small micro-batches, with replicas and without, and find what each block of memory follows.

    A collective call of all ranks. Weights stay as they are, and gradients are set to none.

    Args:
        routed: the model as it is trained, activation checkpointing switched on or off.
        traces: of this rank, from `draw_micro_batches`.
        targets_M: rows of logits that the loss of each takes.
        compute_loss: runs the forward of a micro-batch, by its number, on a padded batch as training has them.
        topology: of the plans that will run, without slots where none has replicas; one node by default.

    Raises:
        AttachError: for a model that is not spread by foreroute.
        ForecastError: when memory follows something else than tokens and rows; when gradients are there already.
    """
    spread = routed._experts
    if any(each.grad is not None for each in routed.model.parameters()):
        raise ForecastError("the model holds gradients, which measuring would add to; set them to none before")
    counts_MLGE = routed.gather_counts(traces)
    num_ranks, rank = counts_MLGE.shape[2], dist.get_rank(spread.groups.consensus.group)
    widths = np.array([len(trace) * np.array([1, trace.lengths.max()]) * trace.lengths.max() for trace in traces])
    sizes = BatchSizes(*(np.repeat(each[:, None], num_ranks, axis=1) for each in (*widths.T, np.array(targets_M))))
    plan = routed.share_plan(lambda: _with_replicas(counts_MLGE, routed.home_LE, topology))
    known = known_rows(counts_MLGE, plan, top_k=routed.spec.top_k)
    logs = _run(routed, plan, counts_MLGE, traces, compute_loss)
    for tries_left in reversed(range(TRIES)):
        sections = []
        try:
            with spread.groups.everyone.agree("measuring memory", ForecastError):
                for (part, layer), bytes_MI in logs.items():
                    sizes_MGX, work_MG = section_sizes(known, sizes, layer)
                    seen: dict[Work, list[Any]] = defaultdict(list)
                    for number, bytes_I in enumerate(bytes_MI, start=1):
                        seen[WORKS[work_MG[number, rank]]].append((sizes_MGX[number, rank], bytes_I))
                    sections.append(describe_section(layer, part, seen))
            break
        except ForecastError:
            if not tries_left:
                raise
        # on a busy machine a thread of gloo may let go of a block late, and hardly of the same one each time
        for name, bytes_MI in _run(routed, plan, counts_MLGE, traces, compute_loss).items():
            pairs = zip(logs[name], bytes_MI, strict=True)
            logs[name] = [np.minimum(*pair) if len(pair[0]) == len(pair[1]) else pair[0] for pair in pairs]
    expert_bytes = sum(each[0].nbytes for each in spread.load()[0].values())
    return StepMemory(expert_bytes, spread.transfers.prefetch, sections)


def _run(
    routed: RoutedTransformer,
    plan: StepPlan,
    counts_MLGE: NDArray[np.int32],
    traces: Sequence[RoutingTrace],
    compute_loss: Callable[[int], Tensor],
) -> dict[tuple[str, int | None], list[NDArray[np.int64]]]:
    """Log all micro-batches but the first, which makes gradients and slots: bytes by part and layer."""
    logs = defaultdict(list)
    rows_M = [routed.rows(trace) for trace in traces]  # anew, as their first forward brings them to the device
    with routed.execute(plan, counts_MLGE, rows_M):
        for number, rows in enumerate(rows_M):
            log = AllocationLog(next(routed.model.parameters()).device)
            with log.open(), _marking(routed, log):
                log.begin("begin")
                with routed.replay(rows):
                    compute_loss(number).backward()
                log.begin("over")
            for section, behind in zip(log.sections, log.sections[1:] if number else (), strict=False):
                logs[section.name].append(np.array([*section.after, behind.begin]) - section.begin)
    routed.model.zero_grad(set_to_none=True)
    return logs


@contextmanager
def _marking(routed: RoutedTransformer, log: AllocationLog) -> Iterator[None]:
    """Begin a section of the log where a decoder layer with a router begins, forward and backward."""
    layers = _decoder_layers(routed)
    handles: list[Any] = []

    def before_first(_: nn.Module, args: Any) -> None:
        if log.current == ("begin", None):
            log.begin("forward", 0)
            if args and args[0].requires_grad:
                args[0].register_hook(lambda _: log.begin("end"))

    def behind(number: int, output: Any) -> None:
        # checkpoints run a layer again, in its backward
        if log.current == ("forward", number):
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda _: log.begin("backward", number))
            log.begin(*(("forward", number + 1) if number + 1 < len(layers) else ("head", None)))

    # first and last among the hooks of a layer, so that what FSDP does around it is in its section
    handles.append(layers[0].register_forward_pre_hook(before_first, prepend=True))
    for number, layer in enumerate(layers):
        handles.append(layer.register_forward_hook(lambda _, __, output, number=number: behind(number, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _decoder_layers(routed: RoutedTransformer) -> list[nn.Module]:
    experts = routed._experts.layers
    paths = [re.match(r".*?\.\d+(?=\.)", layer.path) for layer in experts]
    names = [path and path.group() for path in paths]
    if None in names or len(set(names)) < len(names):
        raise ForecastError(
            f"experts of this {type(routed.model).__name__} are at {experts[0].path}, in no decoder layer "
            "of a list; its memory cannot be forecast"
        )
    return [routed.model.get_submodule(str(name)) for name in names]


def _with_replicas(counts_MLGE: NDArray[np.int32], home_LE: NDArray[np.int16], topology: Topology | None) -> StepPlan:
    """Make a plan of no merit: every fourth micro-step at homes, and one without replicas on half of the ranks."""
    rng = np.random.default_rng(0)
    num_micro_steps, num_layers, num_ranks, _ = counts_MLGE.shape
    topology = topology or Topology(num_ranks, num_ranks, SLOTS, Links(1e9, 1e9, 1e9, 1e-5, 1e-5))
    most = min(SLOTS, topology.redundant_slots)
    cells, load_ML = [], np.zeros((num_micro_steps, num_layers), np.int64)
    for m, layer in np.ndindex(num_micro_steps, num_layers):
        home_E, columns = home_LE[layer], []
        rest_EG = counts_MLGE[m, layer].T.copy()
        for rank in range(num_ranks):
            # every replica gets rows, or the cell has a row of padding
            away = np.flatnonzero((home_E != rank) & (rest_EG.sum(axis=1) > 0))
            num_here = 0 if not most or m % 4 in (3, rank % 2) else int(rng.integers(1, most + 1))
            for slot, expert in enumerate(rng.permutation(away)[:num_here]):
                tokens_G = rest_EG[expert] - rest_EG[expert] // rng.integers(2, 9)
                rest_EG[expert] -= tokens_G
                columns.append((expert, rank, slot, True, tokens_G))
        of = list(zip(*columns, strict=True)) or [()] * 5
        expert_R, rank_R, slot_R = np.array(of[:3], np.int16)
        tokens_RG = np.array(of[4], np.int32).reshape(-1, num_ranks)
        cells.append(CellPlan(home_E, expert_R, rank_R, slot_R, np.array(of[3], np.bool_), tokens_RG))
        load_ML[m, layer] = cells[-1].loads_G(counts_MLGE[m, layer]).max()
    return StepPlan(
        topology=topology,
        previous_home_LE=home_LE,
        hosts=Hosts.of_cells(home_LE, cells),
        max_load_ML=load_ML,
        bound_ML=counts_MLGE.sum(axis=(2, 3)) / num_ranks,
        counts_digest=counts_digest(counts_MLGE),
        slots="shared",
    )
