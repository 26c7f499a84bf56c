"""The configuration of evaluation on problems that are not trained on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from foreroute.files.config_file import MOST, Count, Natural, Section
from foreroute.train.config.idle import refuse_idle
from foreroute.train.config.rollout import LEAST_TEMPERATURE, MOST_TEMPERATURE


class EvaluationConfig(Section):
    """Rewards on held-out problems, with the weights that a step begins with. Nothing here changes the run."""

    every: Natural = 0
    """Steps between evaluations, the first before step 0; 0 makes none."""
    prompts: Count = 32
    """Held-out problems, the same each time."""
    group_size: Count = 1
    """Responses to each."""
    temperature: Annotated[float, Field(ge=0, le=MOST_TEMPERATURE)] = 0.0
    """0 takes the most probable token each time."""
    data: str | None = None
    """dataset: a JSONL file as for training; its first prompts are used."""

    @model_validator(mode="after")
    def _takes_place(self) -> EvaluationConfig:
        if self.every == 0:
            refuse_idle(self, EvaluationConfig.model_fields, "with every = 0; set every, or leave the others out")
        if self.temperature == 0 and self.group_size > 1:
            raise ValueError(
                f"group_size = {self.group_size} responses to a prompt are all the same at temperature = 0; raise the "
                "temperature, or leave group_size out"
            )
        return self

    @model_validator(mode="after")
    def _can_be_had(self) -> EvaluationConfig:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature} overflows; set 0, or {LEAST_TEMPERATURE} and more")
        if self.prompts * self.group_size > MOST:
            raise ValueError(f"prompts times group_size is {self.prompts * self.group_size}; expected {MOST} at most")
        return self
