"""The configuration of what is learned."""

from __future__ import annotations

from pydantic import model_validator

from foreroute.balance.config_file import Count, Section


class TaskConfig(Section):
    """Chains of digit arithmetic with a verifiable answer."""

    min_operands: Count = 8
    """Digits of the shortest chain."""
    max_operands: Count = 8
    """Digits of the longest chain."""

    @model_validator(mode="after")
    def _in_order(self) -> TaskConfig:
        if self.min_operands > self.max_operands:
            raise ValueError(f"min_operands = {self.min_operands} exceeds max_operands = {self.max_operands}")
        return self
