"""The configuration of recompute and update: the method, its parts, and how trainer and engine are reconciled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foreroute.files.config_file import Count, Natural, NotNegative, Positive, Section, Tokens

Routing = Literal["none", "R2", "R3", "R3+weights"]
Advantage = Literal["group_std", "group_mean"]
"""Reward minus the group's mean, over its standard deviation ("group_std") or as it is ("group_mean")."""
Level = Literal["token", "sequence"]
Loss = Literal["clip", "cispo", "reinforce"]
Mean = Literal["token", "sequence", "constant"]
"""What is averaged over: all tokens alike, sequences of equal weight, or tokens over a constant length."""
Correction = Literal["none", "tis", "mis", "icepop"]
Rejection = Literal["none", "sequence", "geometric"]
Method = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "minirl"]

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "group_std", "mean": "sequence", "clip_low": 0.2, "clip_high": 0.2},
    "dr_grpo": {"advantage": "group_mean", "mean": "constant", "clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"advantage": "group_std", "mean": "token", "clip_low": 0.2, "clip_high": 0.28},
    "gspo": {
        "advantage": "group_std",
        "ratio": "sequence",
        "mean": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {"advantage": "group_std", "loss": "cispo", "mean": "token", "clip_low": 1.0, "clip_high": 4.0},
    "minirl": {
        "advantage": "group_mean",
        "loss": "reinforce",
        "mean": "constant",
        "clip_low": 0.2,
        "clip_high": 0.27,
        "correction": {"kind": "tis", "high": 5.0},
    },
}
"""What each method stands for. A key that the configuration gives itself wins. docs/methods.md has the papers."""

BOUNDS: dict[str, dict[str, float]] = {
    "tis": {"high": 2.0},
    "mis": {"high": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
}
"""Bounds of the corrections where the configuration gives none."""


class CorrectionConfig(Section):
    """Weights for tokens whose probabilities in trainer and engine differ."""

    kind: Correction = "none"
    """Truncated or masked importance sampling, or a band."""
    level: Level = "token"
    """Ratios of tokens, or of responses."""
    low: Positive | None = None
    """icepop: lower end of the band; 0.5 by default."""
    high: Positive | None = None
    """Bound of tis and mis (2 by default), upper end of icepop's band (5)."""

    @model_validator(mode="before")
    @classmethod
    def _usual_bounds(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
            return values
        given = {key: value for key, value in values.items() if value is not None}
        return {**BOUNDS.get(values["kind"], {}), **given}

    @model_validator(mode="after")
    def _bounds_of_kind(self) -> CorrectionConfig:
        if self.kind == "none" and (self.low, self.high, self.level) != (None, None, "token"):
            raise ValueError('low, high and level change nothing without a kind; set kind = "tis", "mis" or "icepop"')
        if self.kind in ("tis", "mis") and self.low is not None:
            raise ValueError(f'{self.kind} has no lower bound; leave low out, or set kind = "icepop"')
        if self.kind == "icepop" and self.level == "sequence":
            raise ValueError('icepop drops tokens; leave level out, or set kind = "mis" to drop responses')
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low} is not below high = {self.high}")
        return self


class RejectionConfig(Section):
    """Whole responses that are left out."""

    kind: Rejection = "none"
    """By the ratio of the response, or its geometric mean per token."""
    low: Positive | None = None
    """Smallest accepted ratio of trainer over engine."""
    high: Positive | None = None
    """Largest; for "geometric" a band such as 0.99 to 1.01."""

    @model_validator(mode="after")
    def _bounds_of_kind(self) -> RejectionConfig:
        given = (self.low is not None, self.high is not None)
        if self.kind == "none" and any(given):
            raise ValueError('low and high change nothing without a kind; set kind = "sequence" or "geometric"')
        if self.kind != "none" and not all(given):
            raise ValueError(f'kind = "{self.kind}" needs low and high')
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low} is not below high = {self.high}")
        return self


class RLConfig(Section):
    """The old-log-prob pass and the update."""

    routing: Routing = "R3"
    """Routes of the forwards: live, of the old-log-prob pass (R2), of the rollout (R3), or those with gate weights."""
    router: Literal["trained", "frozen"] = "trained"
    """Whether RL changes the routers."""
    steps: Count = 80
    """Rollouts, each with its update. On resume, at least those recorded."""
    mini_steps: Count = 1
    """Optimizer steps per rollout."""
    micro_step_tokens: Tokens = 4096
    """Tokens of one forward and backward, padding included."""
    learning_rate: Positive = 6e-4
    """Of AdamW, after the warm-up."""
    warmup_steps: Natural = 5
    """Steps over which the learning rate rises."""
    max_grad_norm: Positive = 1.0
    """Larger gradients are scaled down to it."""
    method: Method = "dapo"
    """Sets the next six keys, and minirl the correction, unless given."""
    advantage: Advantage = "group_std"
    """Reward minus its group's mean, over the standard deviation or not."""
    ratio: Level = "token"
    """Of tokens, or the geometric mean over a response."""
    loss: Loss = "clip"
    """Clipped ratio, capped weight, or masked REINFORCE."""
    mean: Mean = "token"
    """Over tokens, sequences, or a constant length."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Ratios below 1 - clip_low are clipped; 1: none."""
    clip_high: Positive = 0.28
    """Ratios above 1 + clip_high are clipped."""
    correction: CorrectionConfig = CorrectionConfig()
    rejection: RejectionConfig = RejectionConfig()
    kl_coefficient: NotNegative = 0.0
    """Weight of the divergence from the first policy; 0 keeps no reference."""

    @model_validator(mode="before")
    @classmethod
    def _as_the_method_says(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        method = values.get("method", "dapo")
        return {**METHODS[method], **values} if isinstance(method, str) and method in METHODS else values

    @model_validator(mode="after")
    def _parts_fit(self) -> RLConfig:
        if self.ratio == "sequence" and self.loss != "clip":
            raise ValueError(f'loss = "{self.loss}" weighs tokens; it needs ratio = "token"')
        if self.ratio == "sequence" and self.mean != "sequence":
            raise ValueError(
                f'ratio = "sequence" gives a response one loss, which mean = "{self.mean}" would multiply by its '
                'length; set mean = "sequence"'
            )
        return self
