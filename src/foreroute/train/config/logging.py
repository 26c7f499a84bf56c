"""The configuration of where else the metrics go."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from foreroute.files.config_file import Section
from foreroute.train.config.idle import refuse_idle


class LoggingConfig(Section):
    """Where else the numbers of metrics.jsonl go. Nothing here changes the run, and all of it may change on resume."""

    tensorboard: bool = False
    """Event files in the run's folder, under tensorboard/. Needs the package tensorboard."""
    wandb: bool = False
    """Weights & Biases. Needs the package wandb."""
    wandb_project: str = "foreroute"
    """The project there. A run keeps its identity when it is resumed, and begins a new one, of the same group, when it
    is rolled back."""
    wandb_mode: Literal["online", "offline"] = "online"
    """Offline runs are kept in the run's folder, for `wandb sync`."""

    @model_validator(mode="after")
    def _takes_place(self) -> LoggingConfig:
        if not self.wandb:
            refuse_idle(self, ("wandb_project", "wandb_mode"), "with wandb = false; set it to true, or leave them out")
        return self
