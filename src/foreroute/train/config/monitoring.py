"""The configuration of what is measured, saved and logged beside training, and of alarms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import MOST_FLOAT, Count, Section
from foreroute.mismatch import AlarmRules, Kind
from foreroute.train.config.unused_keys import refuse_unused

Share = Annotated[float, Field(ge=0, le=1)]


class MeasureConfig(Section):
    """What is measured. Changes nothing in the run."""

    compare_every: Count = 1
    """Steps between measurements of the other side's mismatch (under R3: without replay)."""
    save_trace_every: Count = 20
    """Steps between saved rollouts."""


class CheckpointConfig(Section):
    """When the state is saved."""

    every: Count = 20
    """Steps between checkpoints."""


class AlarmsConfig(Section):
    """When a run is in danger, and what to do then."""

    action: Literal["warn", "stop", "rollback"] = "warn"
    """Say so and go on; end the run; or go back to the last checkpoint from before the trouble, pass over the data
    used since, and replay the rollout's routes (R3) from there on."""
    act_on: list[Kind] = Field(default=["collapse"])
    """The alarms that lead to the action; the others only warn. Ones that "rollback" does not list still decide which
    checkpoint is good."""
    max_rollbacks: Count = 2
    """The run ends when it would have to go back once more."""
    window: Count = AlarmRules.window
    """Measurements in every mean below."""
    collapse_below: Share = AlarmRules.collapse_below
    """`collapse`: mean reward below this share of its running maximum."""
    collapse_for: Count = AlarmRules.collapse_for
    """`collapse`: for so many steps in a row."""
    f2_above: Share = AlarmRules.f2_above
    """`f2`: F(2), a share of response tokens. 1: never."""
    disagreement_growth: Annotated[float, Field(ge=1, le=MOST_FLOAT)] = AlarmRules.disagreement_growth
    """`disagreement`: share of differing routes over that of the first `window` measurements."""
    disagreement_above: Share = AlarmRules.disagreement_above
    """`disagreement`: and more than this share. 1: never."""
    agreement_below: Share = AlarmRules.agreement_below
    """`stale_routes`: share of replayed routes that are still live in the last mini-batch. 0: never."""
    effective_share_below: Share = AlarmRules.effective_share_below
    """`effective_share`: effective sample size of importance weights over tokens. 0: never."""

    @model_validator(mode="after")
    def _can_act(self) -> AlarmsConfig:
        if self.action != "warn" and not self.act_on:
            raise ValueError(f'action = "{self.action}" with an empty act_on never acts; name alarms, or set "warn"')
        unused = {"warn": ("act_on", "max_rollbacks"), "stop": ("max_rollbacks",), "rollback": ()}[self.action]
        refuse_unused(self, unused, f'with action = "{self.action}"; leave out what is of another action')
        return self

    def rules(self) -> AlarmRules:
        """The thresholds."""
        return AlarmRules(**self.model_dump(exclude={"action", "act_on", "max_rollbacks"}))


class LoggingConfig(Section):
    """Where else the numbers of metrics.jsonl go. May change on resume."""

    tensorboard: bool = False
    """Event files in the run's folder, under tensorboard/."""
    wandb: bool = False
    """Weights & Biases."""
    wandb_project: str = "foreroute"
    """The project there. A run keeps its identity when it is resumed, and begins a new one, of the same group, when it
    is rolled back."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline runs stay in the run's folder, for `wandb sync`."""

    @model_validator(mode="after")
    def _takes_place(self) -> LoggingConfig:
        if not self.wandb:
            refuse_unused(
                self, ("wandb_project", "wandb_mode"), "with wandb = false; set it to true, or leave them out"
            )
        return self
