"""Checks that a plan can be executed and that its figures are true, with no code of the planner."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import PlanError, TopologyError, shown
from foreroute.files.container import objection
from foreroute.plan.capabilities import FetchPath
from foreroute.plan.options import PASS_NAMES, PlanOptions
from foreroute.plan.step_plan import TENSORS, StepPlan
from foreroute.plan.topology import check_homes
from foreroute.trace.checks import ascending

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def verify(plan: StepPlan, counts_MLGE: NDArray[np.integer], options: PlanOptions | None = None) -> None:
    """Check every cell of a plan against the counts that it was made for.

    That is: every assignment is served by a host of its expert, and none is lost or made up; every rank is home to
    E / G experts of each layer; a slot holds one replica per cell, of an expert that the rank does not serve otherwise;
    `fetched_R` is true to what the slots held; the largest loads are right and no bound is above them.

    Args:
        plan: of any planner.
        counts_MLGE: integers [M, L, G, E].
        options: limits that the plan must also keep: home moves, replicas and the use of slots.

    Raises:
        PlanError: for the first thing that is wrong, with its cell.
        CountsError: when the plan was made for other counts.
    """
    check_structure(plan)
    plan.require_counts(counts_MLGE)
    # each cell is looked at anew, with no code of the planner, whose errors it would share
    if options is not None:
        _check_options(plan, options)
    _check_tokens(plan, counts_MLGE)


def check_structure(plan: StepPlan) -> None:
    """Check what can be known without the counts: dtypes, shapes, homes, replicas, slots and fetches."""
    _check_arrays(plan)
    for name in ("previous_home_LE", "home_LE"):
        try:
            check_homes(getattr(plan, name), *plan.shape[1:], plan.topology.num_ranks)
        except TopologyError as error:
            raise PlanError(f"{name}: {error}") from error
    _check_replicas(plan)
    _check_fetches(plan)
    _check_figures(plan)
    _check_packing(plan)


def _check_arrays(plan: StepPlan) -> None:
    """Check dtypes, shapes and offsets."""
    if (why := objection(plan.tensors, TENSORS)) is not None:
        raise PlanError(f"the plan is not whole: {why}")
    (num_micro_steps, num_layers, num_experts), num_ranks = plan.shape, plan.topology.num_ranks
    if num_layers < 1 or num_experts < 1 or num_experts % num_ranks:
        raise PlanError(
            f"the plan is of {num_layers} layers with {num_experts} experts on {num_ranks} ranks; expected a layer or "
            "more, and a multiple of the ranks"
        )
    sources, num_replicas = plan.hosts.tokens_RG.shape[1], len(plan.hosts.expert_R)
    # before anything is indexed by a rank
    if sources != num_ranks:
        raise PlanError(f"tokens_RG is of {sources} source ranks; the topology has {num_ranks}")
    offsets, expected = plan.hosts.offsets, num_micro_steps * num_layers + 1
    if len(offsets) != expected or not ascending(offsets, num_replicas):
        raise PlanError(
            f"offsets are {len(offsets)} numbers; expected {expected}, which ascend from 0 to the {num_replicas} "
            "replicas of the plan"
        )


def _check_packing(plan: StepPlan) -> None:
    """Check that sequences are packed into micro-steps and ranks of the plan."""
    packing = plan.packing
    if packing is None:
        if plan.tokens_digest:
            raise PlanError("the plan has a digest of tokens and no packing; expected both or none")
        return
    sizes = (packing.num_micro_steps, packing.num_ranks)
    if sizes != (plan.shape[0], plan.topology.num_ranks) or not plan.tokens_digest:
        raise PlanError(
            f"sequences are packed into {sizes[0]} micro-steps on {sizes[1]} ranks, with the digest "
            f"{plan.tokens_digest or 'of no tokens'}; the plan has {plan.shape[0]} on {plan.topology.num_ranks}"
        )
    for what, of_S, size in zip(("micro-step", "rank"), (packing.micro_step_S, packing.rank_S), sizes, strict=True):
        if len(of_S) and (of_S.min() < 0 or of_S.max() >= size):
            raise PlanError(f"sequences are packed into {what}s {of_S.min()} to {of_S.max()} of {size}")


def _check_figures(plan: StepPlan) -> None:
    """Check gains, paths and bounds."""
    gains: object = plan.gains
    if not isinstance(gains, dict) or (gains and set(gains) != set(PASS_NAMES)):
        raise PlanError(f"gains are {shown(gains)}; expected those of {' and '.join(PASS_NAMES)}, or none")
    if not all(isinstance(gain, float) and -math.inf < gain <= 1 for gain in gains.values()):  # so that NaN is wrong
        raise PlanError(f"gains are {shown(gains)}; expected finite shares of at most 1")
    known = get_args(FetchPath) if gains else (None, *get_args(FetchPath))
    if plan.priced_paths not in known:
        raise PlanError(
            f"priced_paths is {shown(plan.priced_paths)}; expected the path that prices are of, 'host' or 'direct', or "
            "None without gains"
        )
    if plan.unpriced not in ((), ("planning",), ("planning", "votes")) or (plan.unpriced and not gains):
        raise PlanError(
            f"unpriced is {shown(plan.unpriced)}; expected (), ('planning',) or ('planning', 'votes'), and () where no "
            "gains are"
        )
    wrong_ML = ~((plan.bound_ML >= 0) & (plan.bound_ML <= plan.max_load_ML))  # so that NaN is wrong
    if wrong_ML.any():
        m, layer = np.argwhere(wrong_ML)[0].tolist()
        raise PlanError(
            f"{_cell_name(m, layer)}: the bound is {plan.bound_ML[m, layer]} and the largest load "
            f"{plan.max_load_ML[m, layer]}; expected a bound from 0 to the largest load"
        )


def _check_options(plan: StepPlan, options: PlanOptions) -> None:
    """Check the limits that options set."""
    moves_L = (plan.previous_home_LE != plan.home_LE).sum(axis=1)
    if options.home_moves is not None and (moves_L > options.home_moves).any():
        layer = int(np.argmax(moves_L))
        raise PlanError(f"layer {layer}: {moves_L[layer]} homes move; the budget is {options.home_moves} per layer")
    if not options.replicas:
        _refuse(plan, np.ones(len(plan.hosts.expert_R), np.bool_), " in a plan without replicas")
    if plan.slots != options.slots:
        raise PlanError(f"the plan is for {plan.slots} slots; expected {options.slots}")


def _check_replicas(plan: StepPlan) -> None:
    """Check that replicas are of known experts, ranks and slots, one in a slot, and none twice or at its home."""
    num_ranks, slots, num_experts = plan.topology.num_ranks, plan.topology.redundant_slots, plan.shape[2]
    hosts, cell_R = plan.hosts, plan.hosts.cell_R
    for what, value_R, size in (
        ("experts", hosts.expert_R, num_experts),
        ("ranks", hosts.rank_R, num_ranks),
        ("slots on a rank", hosts.slot_R, slots),
    ):
        _refuse(plan, (value_R < 0) | (value_R >= size), f": there are {size} {what}")
    home_R = plan.home_LE[cell_R % plan.shape[1], hosts.expert_R]
    _refuse(plan, home_R == hosts.rank_R, " is on the expert's home")
    # an (expert, rank) pair is one host: two would leave open who serves what
    twice_R = _repeated((cell_R * num_experts + hosts.expert_R) * num_ranks + hosts.rank_R)
    _refuse(plan, twice_R, ": the rank serves that expert twice")
    twice_R = _repeated((cell_R * num_ranks + hosts.rank_R) * slots + hosts.slot_R)
    _refuse(plan, twice_R, ": the slot holds another replica in the same cell")
    _refuse(plan, np.any(hosts.tokens_RG < 0, axis=1), " serves fewer than 0 assignments")


def _check_fetches(plan: StepPlan) -> None:
    """Check that a replica is fetched where its slot does not hold it already."""
    fetched_R = plan.hosts.fetched_R
    if plan.slots == "shared":
        _refuse(plan, ~fetched_R, " is not fetched, but shared slots keep nothing")
        return
    held_R = _held(plan)
    _refuse(plan, ~fetched_R & ~held_R, " is not fetched, but the slot does not hold it")
    _refuse(plan, fetched_R & held_R, " is fetched, but the slot holds it already")


def _held(plan: StepPlan) -> Bools:
    """Mark replicas that their slot holds already: a slot of a layer keeps its expert until it gets another."""
    # sorted by slot and, within one, by time: each replica stands after the one that the slot held before it
    hosts = plan.hosts
    micro_step_R, layer_R = np.divmod(hosts.cell_R, plan.shape[1])
    order = np.lexsort((micro_step_R, hosts.slot_R, hosts.rank_R, layer_R))
    sorted_RC = np.stack([layer_R, hosts.rank_R, hosts.slot_R, hosts.expert_R], axis=1)[order]
    held_R = np.zeros(len(order), np.bool_)
    held_R[order[1:]] = (sorted_RC[1:] == sorted_RC[:-1]).all(axis=1)
    return held_R


def _check_tokens(plan: StepPlan, counts_MLGE: NDArray[np.integer]) -> None:
    """Check that every assignment is served once, the largest loads and the bounds."""
    (num_micro_steps, num_layers, _), hosts = plan.shape, plan.hosts
    layer_of_all = hosts.cell_R % num_layers
    for m in range(num_micro_steps):
        part = slice(int(hosts.offsets[m * num_layers]), int(hosts.offsets[(m + 1) * num_layers]))
        layer_R, expert_R, rank_R, tokens_RG = (
            array[part] for array in (layer_of_all, hosts.expert_R, hosts.rank_R, hosts.tokens_RG)
        )
        # unsigned counts would wrap where replicas serve too much
        rest_LEG = counts_MLGE[m].swapaxes(1, 2).astype(np.int64)
        np.subtract.at(rest_LEG, (layer_R, expert_R), tokens_RG)
        if (rest_LEG < 0).any():
            layer, expert, source = np.argwhere(rest_LEG < 0)[0].tolist()
            raise PlanError(
                f"{_cell_name(m, layer)}: replicas of expert {expert} serve {-rest_LEG[layer, expert, source]} "
                f"assignments of source rank {source} more than there are"
            )
        loads_LG = np.zeros((num_layers, plan.topology.num_ranks), np.int64)
        np.add.at(loads_LG, (np.arange(num_layers)[:, None], plan.home_LE), rest_LEG.sum(axis=2))
        np.add.at(loads_LG, (layer_R, rank_R), tokens_RG.sum(axis=1, dtype=np.int64))
        most_L, mean_L = loads_LG.max(axis=1), loads_LG.mean(axis=1)
        stated_L, bound_L = plan.max_load_ML[m], plan.bound_ML[m]
        for layer in np.flatnonzero((stated_L != most_L) | (bound_L < mean_L * (1 - 1e-12))).tolist():
            raise PlanError(
                f"{_cell_name(m, layer)}: ranks serve {most_L[layer]} assignments at most and {mean_L[layer]} on "
                f"average; the plan states {stated_L[layer]} at most, and the bound {bound_L[layer]}, which is never "
                "below the mean"
            )


def _repeated(keys_R: Ints) -> Bools:
    """Mark all but the first of equal keys."""
    repeated = np.ones(len(keys_R), np.bool_)
    repeated[np.unique(keys_R, return_index=True)[1]] = False
    return repeated


def _refuse(plan: StepPlan, wrong_R: Bools, why: str) -> None:
    """Name the first replica that is wrong, if any is, and say why it is."""
    if wrong_R.any():
        hosts, r = plan.hosts, int(np.argmax(wrong_R))
        cell = divmod(int(hosts.cell_R[r]), plan.shape[1])
        raise PlanError(
            f"{_cell_name(*cell)}: the replica of expert {hosts.expert_R[r]} on rank {hosts.rank_R[r]}, slot "
            f"{hosts.slot_R[r]}{why}"
        )


def _cell_name(micro_step: int, layer: int) -> str:
    """Name a cell in an error."""
    return f"micro-step {micro_step}, layer {layer}"
