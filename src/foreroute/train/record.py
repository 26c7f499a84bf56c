"""Record of a step: reward, mismatch without and with replay on one rollout, loads of ranks."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.capture import Generation
from foreroute.ep.transfer.engine import TransferRecord
from foreroute.layout import PackingCertificate
from foreroute.mismatch import (
    RootCounts,
    RoutingMismatch,
    TokenMismatch,
    margin_histogram,
    routing_mismatch,
    token_mismatch,
)
from foreroute.plan import StepPlan
from foreroute.plan.options import PassName
from foreroute.records import StepRecord
from foreroute.records.step_record import (
    DeviceRecord,
    ExecutionRecord,
    Load,
    MismatchRecord,
    PackingFigure,
    PassRecord,
    Side,
    SuspicionRecord,
)
from foreroute.trace import RoutedLayer, RoutingTrace, concatenate
from foreroute.train.objective import importance_of
from foreroute.train.policy import Alone


@dataclass(frozen=True, eq=False)
class Experience:
    """A step's rollout with its rewards and advantages."""

    generation: Generation  # S = prompts * group size sequences, grouped by prompt
    rewards_S: NDArray[np.float64]  # [S]
    advantages_S: NDArray[np.float64]  # [S]
    # [S], False in groups whose rewards are all equal; they are left out of the update
    informative_S: NDArray[np.bool_]
    # [S], tokens of each response, from its first, that the sentinel leaves in the update; None where it leaves all
    left_S: NDArray[np.int64] | None = None

    @property
    def kept_S(self) -> NDArray[np.int64]:
        """int64 [S], tokens of each response, from its first, that the sentinel leaves in the update."""
        return self.generation.response_lengths if self.left_S is None else self.left_S

    @property
    def trained_S(self) -> NDArray[np.int64]:
        """int64 [S], those that are trained on."""
        return np.where(self.informative_S, self.kept_S, 0)


@dataclass(frozen=True, eq=False)
class Recomputed:
    """One pass of the trainer over a rollout, without gradients."""

    logprobs_R: NDArray[np.float32]  # [R], of the response tokens, sequence after sequence
    entropy_R: NDArray[np.float32]  # [R], in nats
    # the routes that this pass took, and the choices of indexers where they were asked for; last tokens have none
    executed: RoutingTrace
    margins_NL: NDArray[np.float32]  # [N - S, L], top-k margins of its routers; last tokens are not put into the model
    roots: RootCounts | None = None  # of its N - S rows, what the sentinel judges; None where nobody asked


@dataclass(frozen=True, eq=False)
class Updated:
    """Figures of an update."""

    loss: float  # mean over mini-batches, of all ranks
    grad_norm: float  # mean over mini-batches, before clipping, of all ranks
    tokens_4R: NDArray[np.float64]  # of the trained tokens of this rank, what `objective.importance_of` takes
    # for each mini-batch, (token, layer) of this rank whose live top-k is another than the replayed set, and all of
    # them; 0 where nothing is replayed, or it was not watched
    agreement_M2: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepPart:
    """Observations of a step, of one rank or of all of them."""

    experience: Experience
    # forwards of the trainer on it at the same weights: "native" on its own routes, "replayed" on the rollout's; one of
    # them may be missing
    passes: dict[Side, Recomputed]
    updated: Updated
    peak_bytes: int  # most bytes of tensors on the device; 0 on the CPU, where torch counts none
    suspicions: list[SuspicionRecord] | None = None  # of the sentinels of these ranks; None where none watches


def merged(parts: list[StepPart]) -> StepPart:
    """Join the step of all ranks, one rank's sequences after another's."""
    experiences, updates = [part.experience for part in parts], [part.updated for part in parts]
    passes = {
        name: Recomputed(
            np.concatenate([part.passes[name].logprobs_R for part in parts]),
            np.concatenate([part.passes[name].entropy_R for part in parts]),
            concatenate([part.passes[name].executed for part in parts]),
            np.concatenate([part.passes[name].margins_NL for part in parts]),
        )
        for name in parts[0].passes
    }
    experience = Experience(
        Generation.concatenate([each.generation for each in experiences]),
        np.concatenate([each.rewards_S for each in experiences]),
        np.concatenate([each.advantages_S for each in experiences]),
        np.concatenate([each.informative_S for each in experiences]),
        np.concatenate([each.kept_S for each in experiences]),
    )
    updated = replace(
        updates[0],
        tokens_4R=np.concatenate([each.tokens_4R for each in updates], axis=1),
        agreement_M2=np.sum([each.agreement_M2 for each in updates], axis=0),
    )
    watched = [part.suspicions for part in parts if part.suspicions is not None]
    suspicions = [each.model_copy(update={"rank": rank}) for rank, of_rank in enumerate(watched) for each in of_rank]
    peak_bytes = max(part.peak_bytes for part in parts)
    return StepPart(experience, passes, updated, peak_bytes, suspicions if watched else None)


def step_record(
    step: int,
    whole: StepPart,
    trained_with: Side,
    seconds: Mapping[str, float],
    device: torch.device,
    execution: ExecutionRecord | None,
) -> StepRecord:
    """Make one line of metrics.jsonl, of what all ranks saw of a step."""
    experience, passes, updated = whole.experience, whole.passes, whole.updated
    generation, rewards_S = experience.generation, experience.rewards_S
    layers = generation.trace.spec.layers
    # what was not trained on has no ratio
    importance, clip_share = importance_of(updated.tokens_4R)
    # mini-batches that nobody watched have no cells, and a share of none is no share
    differing, cells = updated.agreement_M2[updated.agreement_M2[:, 1] > 0].T
    peak = {"peak_memory_bytes": whole.peak_bytes} if device.type == "cuda" else {}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return StepRecord(
        step=step,
        weight_version=max(generation.trace.versions),
        seconds={phase: round(value, 4) for phase, value in seconds.items()},
        reward_mean=float(rewards_S.mean()),
        reward_std=float(rewards_S.std()),
        exact_share=float((rewards_S == 1).mean()),
        response_tokens_mean=float(generation.response_lengths.mean()),
        entropy=float(passes[trained_with].entropy_R.mean()),
        grad_norm=updated.grad_norm,
        clip_share=clip_share,
        loss=updated.loss,
        tokens=generation.trace.num_rows,
        trained_with=trained_with,
        mismatch={side: mismatch_record(*mismatch_of(generation, each), layers) for side, each in passes.items()},
        margins_LB=margin_histogram(passes["native"].margins_NL).tolist() if "native" in passes else None,
        live_agreement=(1 - differing / cells).tolist() if len(cells) else None,
        importance=importance,
        informative_share=float(experience.informative_S.mean()),
        dropped_tokens=int((generation.response_lengths - experience.kept_S)[experience.informative_S].sum()),
        execution=execution,
        device=DeviceRecord(type=device.type, name=name, **peak),
        suspicions=whole.suspicions,
    )


def mismatch_of(generation: Generation, result: Recomputed) -> tuple[TokenMismatch, RoutingMismatch]:
    """Compare trainer and engine: log-probs of response tokens, routes of all tokens that both routed."""
    return token_mismatch(result.logprobs_R, generation.logprobs_R), routing_mismatch(generation.trace, result.executed)


def mismatch_record(
    tokens: TokenMismatch, routes: RoutingMismatch, layers: Sequence[RoutedLayer] = ()
) -> MismatchRecord:
    """Give the measures of `foreroute.mismatch` as plain data; shares by layer where layers are named."""
    return MismatchRecord(
        response_tokens=tokens.count,
        k3=tokens.k3,
        f2=tokens.f(2.0),
        f1_5=tokens.f(1.5),
        max_abs_log_ratio=tokens.max_abs_log,
        routed_rows=routes.rows,
        differing_share=routes.differing_share,
        differing_tokens_share=routes.differing_tokens_share,
        differing_share_by_layer=dict(zip(map(str, layers), routes.differing_share_L.tolist(), strict=bool(layers))),
    )


@dataclass(eq=False)
class ExecutedPass:
    """Execution of one pass on one rank, under its plan for `counts_MLGE`."""

    name: str
    counts_MLGE: NDArray[np.integer]
    packing: PackingCertificate | None  # by routes, on the first rank
    forecast_bytes: int = 0  # the most that a rank will take; 0 where nothing was forecast
    plan: StepPlan = field(init=False)  # once it is made, as it is executed in this pass
    planning_s: float = 0.0  # seconds that the planner took, on the first rank
    exposed_planning_s: float = 0.0  # seconds that the pass waited for the plan before it began
    # whether pay-off and traffic were on, what is executed, and why, on the first rank
    priced_options: dict[str, str] = field(default_factory=dict)
    transfers: list[TransferRecord] = field(default_factory=list)  # of this rank, once the pass has ended
    # [M, L], assignments that this rank computed, once the pass has ended
    executed_ML: NDArray[np.int64] = field(init=False)

    @property
    def pass_name(self) -> PassName:
        """The pass of the plan that this one belongs to."""
        return "recompute" if self.name == "recompute" else "update"


class MovedHomes(NamedTuple):
    """Experts of all layers that changed their home before a step, what this rank received, and seconds of it all."""

    number: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


def execution_record(executed: list[ExecutedPass], moved: MovedHomes, ranks: Alone) -> ExecutionRecord | None:
    """Make the record "execution" of a step on rank 0, `ranks` alone where nothing was planned. A collective call."""
    if not executed:
        return None if ranks.rank else ExecutionRecord(ranks=ranks.size)
    executed_PMLG = [ranks.all_gather(each.executed_ML).transpose(1, 2, 0) for each in executed]
    transfers = [transfer for each in executed for transfer in each.transfers]
    fetched = [transfer for transfer in transfers if transfer.operation == "fetch"]
    arrived = {
        "host": sum(transfer.host_bytes for transfer in fetched),
        "direct": sum(transfer.direct_bytes for transfer in fetched),
        "gradients": sum(transfer.direct_bytes for transfer in transfers if transfer.operation == "return"),
        "homes": moved.received_bytes,
    }
    bytes_P = ranks.sum(list(arrived.values())).astype(np.int64).tolist()
    transfer_s = sum(transfer.exposed_s for transfer in transfers)
    seconds_G2 = ranks.all_gather(np.array([transfer_s, moved.seconds]))
    if ranks.rank:
        return None
    # what the slowest rank waited for
    transfer_s, moving_s = (round(most, 4) for most in seconds_G2.max(axis=0).tolist())
    loads = [_loads(each, executed_MLG) for each, executed_MLG in zip(executed, executed_PMLG, strict=True)]
    return ExecutionRecord(
        ranks=ranks.size,
        max_over_mean={load: _max_over_mean([each[load] for each in loads]) for load in get_args(Load)},
        replicas=sum(int(each.plan.num_replicas_ML.sum()) for each in executed),
        bytes=dict(zip(arrived, bytes_P, strict=True)),
        home_moves=moved.number,
        moving_homes_s=moving_s,
        exposed_transfer_s=transfer_s,
        planning_s=round(sum(each.planning_s for each in executed), 4),
        exposed_planning_s=round(sum(each.exposed_planning_s for each in executed), 4),
        forecast_memory_bytes=max(each.forecast_bytes for each in executed) or None,
        packing=_packing([each.packing for each in executed if each.packing is not None]),
        passes={
            each.name: PassRecord(
                executed_MLG=of_pass["executed"].tolist(),
                at_home_MLG=of_pass["at_home"].tolist(),
                priced_options=each.priced_options,
            )
            for each, of_pass in zip(executed, loads, strict=True)
        },
    )


def _loads(each: ExecutedPass, executed_MLG: NDArray[np.int64]) -> dict[Load, NDArray[np.int64]]:
    """Give the assignments of every rank [M, L, G]: by the plan, as executed, and with every expert at its home."""
    planned_MLG, at_home_MLG = np.zeros_like(executed_MLG), np.zeros_like(executed_MLG)
    for m, layer in np.ndindex(*executed_MLG.shape[:2]):
        counts_GE = each.counts_MLGE[m, layer]
        cell = each.plan.cell(m, layer)
        planned_MLG[m, layer] = cell.loads_G(counts_GE)
        np.add.at(at_home_MLG[m, layer], cell.home_E, counts_GE.sum(axis=0))
    return {"at_home": at_home_MLG, "planned": planned_MLG, "executed": executed_MLG}


def _packing(found: list[PackingCertificate]) -> dict[PackingFigure, int]:
    """Sum the certificates of passes that were packed by routes."""
    if not found:
        return {}
    return {
        "bound": sum(each.bound for each in found),
        "by_length": sum(each.by_length for each in found),
        "by_routes": sum(each.slowest for each in found),
    }


def _max_over_mean(loads: list[NDArray[np.int64]]) -> float:
    """Sum the busiest rank's load over all cells, over the sum of means."""
    loads_CG = np.concatenate([load_MLG.reshape(-1, load_MLG.shape[2]) for load_MLG in loads])
    return float(loads_CG.max(axis=1).sum() / loads_CG.mean(axis=1).sum())
