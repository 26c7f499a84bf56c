"""The configuration of what is measured, saved and logged beside training, and of alarms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import MOST_FLOAT, Count, Section
from foreroute.mismatch import AlarmRules, Kind
from foreroute.train.config.unused_keys import refuse_unused

Share = Annotated[float, Field(ge=0, le=1)]


class MeasureConfig(Section):
    """What is measured beside training. Nothing here changes the run."""

    compare_every: Count = 1
    """Steps between measurements of the mismatch that the run does not train with (without replay under R3)."""
    save_trace_every: Count = 20
    """Steps between saved rollout traces."""


class CheckpointConfig(Section):
    """When the state is saved."""

    every: Count = 20
    """Steps between checkpoints."""


class AlarmsConfig(Section):
    """When a run is in danger, and what is done then."""

    action: Literal["warn", "stop"] = "warn"
    """Say so and go on, or end the run."""
    act_on: list[Kind] = Field(default=["collapse"])
    """The alarms that end it; the others only warn."""
    window: Count = AlarmRules.window
    """Measurements in every mean below. One that is not taken at each step, see measure.compare_every, takes longer."""
    collapse_below: Share = AlarmRules.collapse_below
    """"collapse": the mean reward is below this share of its running maximum. A loss that is not finite is one too."""
    collapse_for: Count = AlarmRules.collapse_for
    """"collapse": for so many steps in a row."""
    f2_above: Share = AlarmRules.f2_above
    """"f2": share of response tokens whose probabilities in trainer and engine differ more than twofold. 1 is never."""
    disagreement_growth: Annotated[float, Field(ge=1, le=MOST_FLOAT)] = AlarmRules.disagreement_growth
    """"disagreement": the trainer's own routes differ from the engine's for so many times the share of (token, layer)
    that they did over the run's first `window` measurements."""
    disagreement_above: Share = AlarmRules.disagreement_above
    """"disagreement": and for more than this share. 1 is never."""
    agreement_below: Share = AlarmRules.agreement_below
    """"stale_routes": in an update's last mini-batch, share of (token, layer) in which the replayed experts are those
    that the router would pick. 0 is never."""
    effective_share_below: Share = AlarmRules.effective_share_below
    """"effective_share": effective sample size of the importance weights, over the trained tokens. 0 is never."""

    @model_validator(mode="after")
    def _can_act(self) -> AlarmsConfig:
        if self.action != "warn" and not self.act_on:
            raise ValueError(f'action = "{self.action}" with an empty act_on never acts; name alarms, or set "warn"')
        if self.action == "warn":
            refuse_unused(self, ["act_on"], 'with action = "warn"; set "stop", or leave it out')
        return self

    def rules(self) -> AlarmRules:
        """The thresholds."""
        return AlarmRules(**self.model_dump(exclude={"action", "act_on"}))


class LoggingConfig(Section):
    """Where else the numbers of metrics.jsonl go. Nothing here changes the run, and all of it may change on resume."""

    tensorboard: bool = False
    """Event files in the run's folder, under tensorboard/. Needs the package tensorboard."""
    wandb: bool = False
    """Weights & Biases. Needs the package wandb."""
    wandb_project: str = "foreroute"
    """The project there. A run keeps its identity when it is resumed."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline runs are kept in the run's folder, for `wandb sync`."""

    @model_validator(mode="after")
    def _takes_place(self) -> LoggingConfig:
        if not self.wandb:
            refuse_unused(
                self, ("wandb_project", "wandb_mode"), "with wandb = false; set it to true, or leave them out"
            )
        return self
