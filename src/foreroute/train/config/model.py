"""The configuration of the policy and of what it knows before RL."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from foreroute.balance.config_file import Count, Section


class LoRAConfig(Section):
    """Low-rank adapters (peft), which RL trains instead of the model's weights. Routers stay as `rl.router` says."""

    rank: Annotated[int, Field(ge=0)] = 0
    """Of the matrices A and B in W + alpha / rank · B A; 0 puts no adapters in."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """See there."""
    dropout: Annotated[float, Field(ge=0, le=0)] = 0.0
    """0: the update's probabilities are compared with the recompute's, which drops nothing."""
    targets: list[str] = Field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"], min_length=1)
    """Names of linear layers, in every block."""

    @model_validator(mode="after")
    def _has_rank(self) -> LoRAConfig:
        given = sorted(self.model_fields_set - {"rank"})
        if not self.rank and any(getattr(self, key) != getattr(LoRAConfig(), key) for key in given):
            raise ValueError(f"{', '.join(given)} change nothing without adapters; set rank, such as 16")
        return self


class ModelConfig(Section):
    """The policy, made from a configuration and the seed."""

    family: str = "qwen3_moe"
    """Model type of transformers."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    """How transformers computes the experts of a layer."""
    sizes: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Fields of the family's configuration; the vocabulary comes from the task."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and arithmetic. With bfloat16 the optimizer keeps weights in float32, and gradients are float32."""
    gradient_checkpointing: Literal["off", "reentrant", "non_reentrant"] = "off"
    """Keep the inputs of layers alone, and compute the rest again in the backward. Changes no bit."""
    lora: LoRAConfig = LoRAConfig()

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
