"""The configuration of the policy and of what it knows before RL."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import Count, Natural, NotNegative, Positive, Section
from foreroute.train.config.unused_keys import refuse_unused


class LoRAConfig(Section):
    """Low-rank adapters (peft) that RL trains in place of the weights; `rl.router` still decides about routers."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of A and B in W + alpha / rank · B A; 0: no adapters."""
    alpha: Positive = 32.0
    """Scale of the adapters."""
    dropout: Annotated[float, Field(ge=0, le=0)] = 0.0
    """0 only: the update must repeat the probabilities of the old-log-prob pass."""
    targets: list[str] = Field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"], min_length=1)
    """Names of linear layers, in every block."""

    @model_validator(mode="after")
    def _has_rank(self) -> LoRAConfig:
        if not self.rank:
            refuse_unused(self, LoRAConfig.model_fields, "without adapters; set rank, such as 16")
        return self


class ModelConfig(Section):
    """The policy: a Hugging Face model from a folder, or a new one from sizes and seed."""

    path: str | None = None
    """Folder of an MoE model: config.json and safetensors."""
    tokenizer: str | None = None
    """Folder of a tokenizer; the model's own by default. A new model gets its vocabulary."""
    family: str | None = None
    """Without path: model type in transformers, "qwen3_moe" by default."""
    experts_implementation: Literal["eager", "grouped_mm", "batched_mm"] = "grouped_mm"
    """How transformers computes experts, if the family has a choice."""
    sizes: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Without path: fields of the family's configuration, without the vocabulary."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Weights and arithmetic. The optimizer's weights and gradients are float32."""
    gradient_checkpointing: Literal["off", "reentrant", "non_reentrant"] = "off"
    """Recompute activations in the backward. Changes no bit."""
    lora: LoRAConfig = LoRAConfig()

    @model_validator(mode="before")
    @classmethod
    def _usual_family(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("path") is not None or values.get("family") is not None:
            return values
        return {**values, "family": "qwen3_moe"}

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.path is not None and (self.family is not None or self.sizes):
            raise ValueError("path names a model that has its family and sizes; leave family and sizes out")
        if "vocab_size" in self.sizes:
            raise ValueError("sizes.vocab_size comes from the task; leave it out")
        return self

    @property
    def tokenizer_folder(self) -> str | None:
        """Where the tokenizer is, if there is one."""
        return self.tokenizer or self.path


class WarmStartConfig(Section):
    """Supervised training before RL."""

    checkpoint: str | None = None
    """A checkpoint to start from, instead of the other keys."""
    max_steps: Natural = 800
    """Most steps; the learning rate falls along a cosine. 0, the default with model.path, skips the warm start."""
    batch_size: Count = 128
    """Right answers per step."""
    learning_rate: Positive = 3e-3
    """Of AdamW, at first."""
    stop_at_loss: Positive = 0.3
    """Stop when the loss's moving average, nats per answer token, is below this."""
    aux_loss: NotNegative = 0.01
    """Weight of the load-balancing loss; RL has none."""

    @model_validator(mode="after")
    def _takes_place(self) -> WarmStartConfig:
        others = [name for name in WarmStartConfig.model_fields if name not in ("checkpoint", "max_steps")]
        if self.checkpoint is not None:
            # 0 is what a model from a path has by default
            refuse_unused(
                self, [*others, *(["max_steps"] if self.max_steps else [])], "beside a checkpoint; leave it out"
            )
        elif self.max_steps == 0:
            refuse_unused(self, others, "with max_steps = 0, the default for a model from a path; set max_steps")
        return self
