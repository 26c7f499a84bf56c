"""One line of `metrics.jsonl`: every key that a step may have, its type, and what it means.

The trainer makes these records, alarms and the report read them. Fields without a default are always in their object;
a line of another trainer may leave the others out. The reference (docs/reference/records.md) shows the strings below.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from foreroute.files.config_file import Section
from foreroute.mismatch import LOG10_EDGES, LooksLike

Side = Literal["native", "replayed"]
"""Routing of the trainer when the mismatch was measured: by itself, or with the rollout's routes replayed."""
SIDES: tuple[Side, ...] = ("native", "replayed")
"""Both, in the order of tables and legends."""

Load = Literal["at_home", "planned", "executed"]
"""Load of the ranks: with every expert at its home, by the plan, or as it ran."""
PackingFigure = Literal["bound", "by_length", "by_routes"]
"""Sum of assignments of the slowest ranks, as sequences share micro-steps; none is below the bound at these homes."""
ROUNDED = 1e-6
"""Rounding lets a quotient of sums end so far outside of its bounds."""


def _check_share(share: float) -> float:
    if share < -ROUNDED or share > 1 + ROUNDED:
        raise ValueError("expected a number from 0 to 1")
    return share


Share = Annotated[float, AfterValidator(_check_share)]
"""From 0 to 1, or NaN: a share of nothing."""
Loads = list[list[list[int]]]
"""Assignments [M][L][G] of every rank in every cell."""
AlarmName = Literal["collapse", "f2", "disagreement", "stale_routes", "effective_share", "sentinel"]
"""Subject of an alarm. The constants of `foreroute.records.alarm_rules` say when each goes off."""
WORDS: dict[AlarmName, str] = {
    "collapse": "reward has collapsed, or the loss is not finite",
    "f2": "too many tokens are far apart in trainer and engine, F(2)",
    "disagreement": "routing disagreement of trainer and engine has grown",
    "stale_routes": "replayed routes are no longer those that the policy would take",
    "effective_share": "importance weights leave few effective samples",
    "sentinel": "replayed routes are not those of their tokens and weights",
}
ADVICE: dict[AlarmName, str] = {
    "collapse": "Start again from a checkpoint from before it (warm_start.checkpoint), with a lower rl.learning_rate "
    "or fewer rl.mini_steps.",
    "f2": 'Train with replay (rl.routing = "R3") if the run does not. If it does, routing is not the cause: run '
    "foreroute doctor on a saved rollout, and check that the engine has the last weights, the temperature and the "
    "precision that you meant.",
    "disagreement": 'Train with replay (rl.routing = "R3"), or check with foreroute doctor that the engine gets every '
    "update's weights. A run that replays may go on as long as F(2) and the reward hold.",
    "stale_routes": "Lower rl.learning_rate or rl.mini_steps, so that an update moves the policy less. A run whose "
    "held-out reward rises may go on; only runs that replay can have this alarm, so it does not speak against replay.",
    "effective_share": "Lower rl.learning_rate or rl.mini_steps, or bound the weights with rl.correction.",
    "sentinel": "Look at what brings routes and weights from the engine to the trainer. "
    'rl.sentinel = "drop" leaves tokens after such rows out of the update, '
    'or all rows of a rank where a layer or all are suspected; "stop" ends the run.',
}
"""Advice on each, in the keys of `foreroute train`."""


class Record(Section):
    """A part of a line, in which NaN and infinities are numbers."""

    model_config = ConfigDict(allow_inf_nan=True, populate_by_name=True)

    def to_json(self) -> dict[str, Any]:
        """Return plain values by key; what was not recorded has no key."""
        return self.model_dump(exclude_none=True, by_alias=True)


class MismatchRecord(Record):
    """Mismatch of trainer and rollout engine at one step."""

    response_tokens: int | None = None
    """Response tokens compared."""
    k3: float
    """k3, nats per response token."""
    f2: Share
    """F(2), a share of response tokens."""
    f1_5: Share | None = Field(None, validation_alias="f1.5", serialization_alias="f1.5")
    """F(1.5), a share of response tokens."""
    max_abs_log_ratio: float | None = None
    """The largest |log r|."""
    routed_rows: int | None = None
    """Tokens that both sides routed."""
    differing_share: Share
    """Share of (token, layer) whose expert sets differ."""
    differing_tokens_share: Share
    """Share of tokens with a differing layer."""
    differing_share_by_layer: dict[str, Share] = Field(default_factory=dict)
    """Share of tokens whose expert set differs, by layer as the model numbers it: `decoder 3`."""


class ImportanceRecord(Record):
    """Probabilities of the trainer over the engine's on the trained tokens, and what a correction did about them."""

    ratio_mean: float | None = None
    """Mean of rho, trainer over engine; 1 in expectation."""
    ratio_max: float | None = None
    """Largest rho; above float64, its largest number."""
    effective_share: Share
    """(Σ rho)² / (n Σ rho²), effective sample size over tokens."""
    weight_mean: float | None = None
    """Mean weight of the correction."""
    cut_share: Share
    """Share of tokens that the correction truncated or masked."""


class PassRecord(Record):
    """One pass of an expert-parallel step: the load of every rank in every cell, [M][L][G]."""

    executed_MLG: Loads
    """Assignments as executed."""
    at_home_MLG: Loads
    """Assignments with every expert at its home."""
    priced_options: dict[str, str] = Field(default_factory=dict)
    """Settings `pay_off` and `traffic`, whether the pass went by the plan or at homes, and why."""


class ExecutionRecord(Record):
    """Execution of an expert-parallel step. Without a plan there are the ranks alone."""

    ranks: int
    """Number of ranks."""
    max_over_mean: dict[Load, float] = Field(default_factory=dict)
    """By load: busiest rank's assignments over the mean, summed over cells."""
    replicas: int | None = None
    """Replicas of all cells."""
    bytes: dict[str, int] = Field(default_factory=dict)
    """Arrived: weights by `host` memory, `direct`, `gradients`, moved `homes`."""
    home_moves: int | None = None
    """Experts that changed their home before the step."""
    moving_homes_s: float | None = None
    """Seconds of placing and moving them."""
    exposed_transfer_s: float | None = None
    """Seconds that the slowest rank waited for replicas."""
    planning_s: float | None = None
    """Seconds of planning."""
    exposed_planning_s: float | None = None
    """Seconds that passes waited for plans."""
    packing: dict[PackingFigure, int] = Field(default_factory=dict)
    """Packed by routes: assignments of the slowest rank at homes, summed over cells, beside `bound` and `by_length`."""
    forecast_memory_bytes: int | None = None
    """Most bytes of any rank in an update, modelled before it ran; with `memory_budget`."""
    passes: dict[str, PassRecord] = Field(default_factory=dict)
    """By name: recompute, update 0, ..."""

    @model_validator(mode="after")
    def _check_loads(self) -> ExecutionRecord:
        if self.passes and {"at_home", "executed"} - self.max_over_mean.keys():
            raise ValueError("max_over_mean needs at_home and executed where there are passes")
        if self.packing and set(get_args(PackingFigure)) - self.packing.keys():
            raise ValueError("packing needs bound, by_length and by_routes")
        for name, each in self.passes.items():
            try:
                loads = np.array([each.executed_MLG, each.at_home_MLG], np.int64)
            except ValueError:  # lists of uneven lengths
                loads = np.zeros(0, np.int64)
            if loads.ndim != 4 or loads.shape[3] != self.ranks or not loads.size:
                raise ValueError(
                    f"executed_MLG and at_home_MLG of pass {name} need the same numbers of micro-steps and layers, "
                    f"and loads of {self.ranks} ranks"
                )
        return self


class DeviceRecord(Record):
    """Device of a step."""

    type: str
    """`cpu` or `cuda`."""
    name: str
    """Its name."""
    peak_memory_bytes: int | None = None
    """Most bytes of tensors on any rank; CUDA only."""


class SuspicionRecord(Record):
    """Suspicion of the sentinel, which a healthy run does not raise."""

    looks_like: str
    """The likeliest cause: one of `foreroute.mismatch.LooksLike`."""
    sentence: str
    """Suspected rows, since which token, or the layer."""
    share: Share
    """Share of (row, layer) among those whose router would pick otherwise."""
    usual: Share | None = None
    """The same in the run so far; None before there was enough."""
    sequence: int | None = None
    """Number of the sequence in a rank's rollout; None where all are concerned."""
    rank: int = 0
    """Rank of that rollout."""

    @property
    def advice(self) -> str:
        """Advice on what to look at, in one sentence."""
        return LooksLike(self.looks_like).advice if self.looks_like in [*LooksLike] else ADVICE["sentinel"]


class Alarm(Record):
    """A warning that is on after a step."""

    name: AlarmName
    """Subject of the alarm."""
    since: int
    """The first step whose figures it rests on."""
    value: float
    """Value that was seen."""
    threshold: float
    """The limit that it passed."""

    @property
    def advice(self) -> str:
        """Advice on what to do about it."""
        return ADVICE[self.name]

    def __str__(self) -> str:
        """Say what was seen, with the figures."""
        beside = f", {'usual' if self.name == 'sentinel' else 'limit'} {self.threshold:.3g}"
        if self.name == "sentinel" and not self.threshold:  # too little was seen to say
            beside = ""
        return f"{WORDS[self.name]} (since step {self.since}: {self.value:.3g}{beside})"


class StepRecord(Record):
    """One step of a run. What is None was not recorded."""

    step: int
    """From 0."""
    weight_version: int | None = None
    """Newest weights that sampled a token."""
    seconds: dict[str, float] = Field(default_factory=dict)
    """By phase."""
    reward_mean: float | None = None
    """Mean reward of the responses."""
    reward_std: float | None = None
    """Its standard deviation."""
    exact_share: Share | None = None
    """Share of rewards of exactly 1."""
    response_tokens_mean: float | None = None
    """Mean length of the responses."""
    entropy: float | None = None
    """Trainer's mean entropy, nats per response token."""
    grad_norm: float | None = None
    """Norm before clipping, mean over mini-batches."""
    clip_share: Share | None = None
    """Share of trained tokens that the clip bounds changed."""
    loss: float | None = None
    """Mean over the mini-batches."""
    tokens: int | None = None
    """Rows of the rollout's trace."""
    trained_with: Side | None = None
    """`native` or `replayed`: whose routes the update used."""
    mismatch: dict[Side, MismatchRecord] = Field(default_factory=dict)
    """By side, `native` and `replayed`."""
    margins_LB: list[list[int]] | None = None
    """Decisions of the trainer's own routers in each layer and bin of `foreroute.mismatch.LOG10_EDGES`."""
    live_agreement: list[float] | None = None
    """By mini-batch: share of (token, layer) whose live top-k is the replayed set."""
    importance: ImportanceRecord | None = None
    """Ratios of trainer over engine."""
    informative_share: Share | None = None
    """Share of responses with an advantage."""
    dropped_tokens: int | None = None
    """Tokens of these that the sentinel left out of the update."""
    execution: ExecutionRecord | None = None
    """Record of experts on several ranks."""
    device: DeviceRecord | None = None
    """Device of the step."""
    suspicions: list[SuspicionRecord] | None = None
    """Suspicions of the sentinel; empty of a healthy step."""
    alarms: list[Alarm] | None = None
    """Those that are on: `name`, `since` which step, `value`, `threshold`."""

    @model_validator(mode="after")
    def _check_bins(self) -> StepRecord:
        # counts of other bins would be drawn at wrong margins
        bins = len(LOG10_EDGES) - 1
        if any(len(counts_B) != bins for counts_B in self.margins_LB or ()):
            raise ValueError(f"margins_LB needs {bins} counts in every layer")
        return self
