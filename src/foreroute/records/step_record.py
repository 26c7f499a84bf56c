"""One line of `metrics.jsonl`: every key that a step may have, its type, and what it means.

The trainer makes these dictionaries, and the report reads them. Only keys marked as required are always there: a line
of another trainer, or of an older version, may leave the others out. Keys that are not listed here are passed over.
docs/metrics.md is made from the strings below.
"""

import math
from functools import cache
from typing import Annotated, Literal, Required

import numpy as np
from annotated_types import Ge, Lt
from pydantic import AfterValidator, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # that of Python 3.11 is not enough for pydantic

from foreroute.mismatch import Alarm

Side = Literal["native", "replayed"]
"""How the trainer was routed when the mismatch was measured: by itself, or with the rollout's routes replayed."""
SIDES: tuple[Side, ...] = ("native", "replayed")
"""Both, in the order of tables and legends."""

Load = Literal["at_home", "planned", "executed"]
"""Whose load of the ranks: every expert at its home, the plan's, or what ran."""

ROUNDED = 1e-6
"""A share that is a quotient of sums may end so far outside."""


def _share(value: float) -> float:
    if value < -ROUNDED or value > 1 + ROUNDED:
        raise ValueError(f"it is {value}; expected a share from 0 to 1")
    return value


Share = Annotated[float, AfterValidator(_share)]
"""From 0 to 1, or NaN: a share of nothing."""
Seconds = float
Loads = list[list[list[Annotated[int, Lt(2**63)]]]]
"""Assignments [M][L][G] of every rank in every cell."""

NumRanks = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,8}$")]
"""A number of ranks, as a key of JSON."""

# `f1.5` is no name for the body of a class.
_MilderShare = TypedDict("_MilderShare", {"f1.5": Share}, total=False)


class MismatchRecord(_MilderShare, total=False):
    """How far trainer and rollout engine were apart at one step."""

    response_tokens: int
    """Response tokens compared."""
    k3: Required[float]
    """k3, nats per response token."""
    f2: Required[Share]
    """F(2), a share of response tokens."""
    max_abs_log_ratio: float
    """The largest |log r|."""
    routed_rows: int
    """Tokens that both sides routed."""
    differing_share: Required[Share]
    """Share of (token, layer) whose expert sets differ."""
    differing_tokens_share: Required[Share]
    """Share of tokens with a differing layer."""
    differing_share_by_layer: list[Share]
    """The same, per layer."""


class MarginsRecord(TypedDict):
    """Gaps between the K-th and the (K+1)-th selection score, by layer."""

    log10_edges: list[float]
    """Edges of the bins, decimal logarithms."""
    counts_LB: list[list[int]]
    """Decisions in each layer and bin."""


class ImportanceRecord(TypedDict, total=False):
    """Probabilities of the trainer over the engine's on the trained tokens, and what a correction did about them."""

    ratio_mean: float
    """Mean of rho, trainer over engine; 1 in expectation."""
    ratio_max: float
    """Largest rho; above float64, its largest number."""
    effective_share: Required[Share]
    """(Σ rho)² / (n Σ rho²), effective sample size over tokens."""
    weight_mean: float
    """Mean weight of the correction."""
    cut_share: Required[Share]
    """Share of tokens that the correction truncated or masked."""
    rejected_sequences: Required[int]
    """Responses that rejection left out."""


class SamplingRecord(TypedDict, total=False):
    """How the responses of a step were come by."""

    rounds: int
    """Rounds of dynamic sampling."""
    responses: int
    """Responses in all rounds."""
    informative_share: Share
    """Share of kept responses with an advantage."""


class EvaluationRecord(TypedDict, total=False):
    """Rewards on held-out problems."""

    responses: Required[int]
    """How many."""
    reward_mean: Required[float]
    """Mean reward."""
    reward_std: float
    """Its standard deviation."""
    exact_share: Share
    """Share of rewards of exactly 1."""
    response_tokens_mean: float
    """Mean length."""
    reward_failures: int
    """Responses whose reward function failed."""
    reward_failure: str
    """The first failure."""


class StageRecord(TypedDict, total=False):
    """One stage of an expert-parallel step: the load of every rank in every cell, [M][L][G]."""

    planned_MLG: Loads
    """Assignments by the plan."""
    executed_MLG: Required[Loads]
    """Assignments as executed."""
    at_home_MLG: Required[Loads]
    """Assignments with every expert at its home."""
    replicas: int
    """Replicas of all cells."""
    fell_back: list[dict[str, str | int]]
    """Cells served by homes alone, and why."""
    priced_options: dict[str, str]
    """Whether `pay_off` and `traffic` were on, and why."""


def _check_stage(stage: StageRecord) -> StageRecord:
    try:
        at_home, executed = (np.array(stage[name], np.int64) for name in ("at_home_MLG", "executed_MLG"))
        fits = at_home.shape == executed.shape and at_home.ndim == 3 and at_home.size > 0
    except ValueError:  # lists of uneven lengths
        fits = False
    if not fits:
        raise ValueError("at_home_MLG and executed_MLG need the same numbers of micro-steps, layers and ranks")
    return stage


class ExecutionRecord(TypedDict, total=False):
    """How an expert-parallel step was executed. Without a plan there are the ranks alone."""

    ranks: Required[int]
    """How many."""
    max_over_mean: dict[Load, float]
    """By load: busiest rank's assignments over the mean, summed over cells."""
    replicas: int
    """Replicas of all cells."""
    bytes: dict[str, int]
    """Arrived: weights by `host` memory, `direct`, `gradients`, moved `homes`."""
    home_moves: int
    """Experts that changed their home before the step."""
    moving_homes_s: Seconds
    """Seconds of placing and moving them."""
    cells_at_home: int
    """Cells that fell back to their homes."""
    exposed_transfer_s: Seconds
    """Seconds that the slowest rank waited for replicas."""
    planning_s: Seconds
    """Seconds of planning."""
    exposed_planning_s: Seconds
    """Seconds that stages and micro-steps waited for plans."""
    hidden_planning_share: float
    """Share of planning that nothing waited for."""
    stages: dict[str, Annotated[StageRecord, AfterValidator(_check_stage)]]
    """By name: recompute, update 0, ..."""


class DeviceRecord(TypedDict, total=False):
    """Where a step ran."""

    kind: Required[str]
    """`cpu` or `cuda`."""
    name: Required[str]
    """Its name."""
    peak_memory_bytes: Annotated[int, Ge(0)] | None
    """Most bytes of tensors on any rank; CUDA only."""


def _check_margins(margins: MarginsRecord) -> MarginsRecord:
    edges = margins["log10_edges"]
    if not all(math.isfinite(edge) for edge in edges):
        raise ValueError("log10_edges must be finite")
    if edges != sorted(set(edges)):
        raise ValueError("log10_edges must ascend")
    if any(len(counts) != len(edges) - 1 for counts in margins["counts_LB"]):
        raise ValueError(f"{len(edges)} log10_edges need {len(edges) - 1} counts in every layer of counts_LB")
    return margins


def _check_execution(execution: ExecutionRecord) -> ExecutionRecord:
    stages = execution.get("stages", {})
    if stages and {"at_home", "executed"} - execution.get("max_over_mean", {}).keys():
        raise ValueError("max_over_mean needs at_home and executed where there are stages")
    if any(len(stage["executed_MLG"][0][0]) != execution["ranks"] for stage in stages.values()):
        raise ValueError(f"stages need loads of {execution['ranks']} ranks")
    return execution


class StepRecord(TypedDict, total=False):
    """One step of a run. What is not there was not recorded."""

    step: Required[int]
    """From 0."""
    weight_version: int | None
    """Newest weights that sampled a token."""
    staleness: int | None
    """Versions that the oldest route is behind the policy."""
    seconds: dict[str, Seconds]
    """By stage."""
    reward_mean: float | None
    """Mean reward of the responses (of the first round)."""
    reward_std: float | None
    """Its standard deviation."""
    exact_share: Share | None
    """Share of rewards of exactly 1."""
    reward_failures: int
    """Responses whose reward function failed."""
    reward_failure: str
    """The first failure."""
    response_tokens_mean: float | None
    """Mean length of the responses."""
    entropy: float | None
    """Trainer's mean entropy, nats per response token."""
    grad_norm: float | None
    """Norm before clipping, mean over mini-batches."""
    clip_share: Share | None
    """Share of trained tokens that the clip bounds changed."""
    loss: float | None
    """Mean over the mini-batches."""
    kl: float | None
    """KL(policy || reference) on trained tokens, estimated."""
    tokens: int | None
    """Rows of the rollout's trace."""
    trained_with: Side
    """`native` or `replayed`: whose routes the update used."""
    mismatch: dict[Side, MismatchRecord]
    """By side, `native` and `replayed`."""
    margins: Annotated[MarginsRecord, AfterValidator(_check_margins)] | None
    """Of the trainer's own routers."""
    live_agreement: list[float]
    """By mini-batch: share of (token, layer) whose live top-k is the replayed set."""
    expert_load: dict[NumRanks, float]
    """By number of ranks: busiest over mean, experts in contiguous blocks."""
    importance: ImportanceRecord | None
    """Of trainer over engine."""
    sampling: SamplingRecord | None
    """How responses were sampled."""
    skipped_prompts: int
    """Prompts that were too long."""
    evaluation: EvaluationRecord | None
    """On held-out problems, at steps that evaluate."""
    execution: Annotated[ExecutionRecord, AfterValidator(_check_execution)] | None
    """With experts on several ranks."""
    device: DeviceRecord | None
    """Where the step ran."""
    alarms: list[Alarm] | None
    """Those that are on: `kind`, `since` which step, `value`, `threshold`."""


@cache
def _step_type() -> TypeAdapter[StepRecord]:
    return TypeAdapter(StepRecord)


def parse_step(line: bytes) -> StepRecord:
    """Read one line of `metrics.jsonl`.

    Raises:
        pydantic.ValidationError: when a required key is missing, or a value is of another type or out of range.
    """
    return _step_type().validate_json(line, strict=True)


def why_invalid(error: ValueError) -> str:
    """What is wrong with a line or a configuration, in one sentence: the place and the reason of the first error."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]
