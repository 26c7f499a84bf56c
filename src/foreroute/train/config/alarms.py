"""The configuration of collapse alarms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import MOST_FLOAT, Count, Section
from foreroute.mismatch import AlarmRules, Kind
from foreroute.train.config.idle import refuse_idle

Share = Annotated[float, Field(ge=0, le=1)]


class AlarmsConfig(Section):
    """When a run is in danger, and what is done then."""

    action: Literal["warn", "stop", "rollback"] = "warn"
    """Say so and go on; end the run; or go back to the last checkpoint from before the trouble, pass over the data
    used since, and replay the rollout's routes (R3) from there on."""
    act_on: list[Kind] = Field(default=["collapse"])
    """The alarms that lead to the action; the others only warn. Ones that "rollback" does not list still decide which
    checkpoint is good."""
    max_rollbacks: Count = 2
    """The run ends when it would have to go back once more."""
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
    """"stale_routes": in an update's last mini-step, share of (token, layer) in which the replayed experts are those
    that the router would pick. 0 is never."""
    effective_share_below: Share = AlarmRules.effective_share_below
    """"effective_share": effective sample size of the importance weights, over the trained tokens. 0 is never."""

    @model_validator(mode="after")
    def _can_act(self) -> AlarmsConfig:
        if self.action != "warn" and not self.act_on:
            raise ValueError(f'action = "{self.action}" with an empty act_on never acts; name alarms, or set "warn"')
        idle = {"warn": ("act_on", "max_rollbacks"), "stop": ("max_rollbacks",), "rollback": ()}[self.action]
        refuse_idle(self, idle, f'with action = "{self.action}"; leave out what is of another action')
        return self

    def rules(self) -> AlarmRules:
        """The thresholds."""
        return AlarmRules(**self.model_dump(exclude={"action", "act_on", "max_rollbacks"}))
