"""What a rollout engine is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

from foreroute.capture.arguments import shown, whole_number
from foreroute.errors import ConfigError

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled, the same for every engine.

    Attributes:
        max_new_tokens: a response ends here unless `end_token` came first.
        end_token: ends a response and is part of it; -1 for none.
        group_size: responses per prompt.
        temperature: divides the logits; log-probs are those of the distribution sampled from. 0 takes the most probable
            token each time; log-probs are then those of the undivided logits.
    """

    max_new_tokens: int
    end_token: int
    group_size: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("end_token", -1), ("group_size", 1)):
            whole_number(getattr(self, name), name, least, MAX_INT32, kind=ConfigError)
        temperature: object = self.temperature
        if isinstance(temperature, bool) or not isinstance(temperature, Real) or not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {shown(temperature)}; expected a number of 0 or more")
