"""The configuration of the policy and of what it knows before RL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.balance.config_file import Count, Section


class ModelConfig(Section):
    """The policy, made from a configuration and the seed."""

    family: str = "qwen3_moe"
    """Model type of transformers."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    """How transformers computes the experts of a layer."""
    sizes: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Fields of the family's configuration; the vocabulary comes from the task."""

    @model_validator(mode="after")
    def _vocabulary_of_the_task(self) -> ModelConfig:
        if "vocab_size" in self.sizes:
            raise ValueError("sizes.vocab_size comes from the task; leave it out")
        return self


class WarmStartConfig(Section):
    """Supervised training before RL, until the model half knows the task."""

    checkpoint: str | None = None
    """A checkpoint to start from instead; then nothing else here is used."""
    max_steps: Count = 800
    """Supervised steps at most; the learning rate falls along a cosine over so many."""
    batch_size: Count = 128
    """Right answers per step."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """Of AdamW, at the start."""
    stop_at_loss: Annotated[float, Field(gt=0)] = 0.3
    """Training stops when the moving average of the loss, in nats per answer token, falls below this."""
    aux_loss: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the load-balancing loss. RL uses none."""
