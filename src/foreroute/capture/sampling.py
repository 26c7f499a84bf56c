"""What a rollout engine is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from foreroute.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled, the same for every engine.

    Attributes:
        max_new_tokens: a response ends here unless `end_token` came first.
        end_token: ends a response and is part of it.
        group_size: responses per prompt.
        temperature: divides the logits; log-probs are those of the distribution sampled from. 0 takes the most probable
            token each time; log-probs are then those of the undivided logits.
    """

    max_new_tokens: int
    end_token: int
    group_size: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.group_size < 1 or not self.temperature >= 0:
            raise ConfigError(
                f"{self} cannot be sampled; expected at least one token and response, and a temperature of 0 or more"
            )
