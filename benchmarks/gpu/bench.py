"""What is run with sessions open and without: forwards, steps, and sampling token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.layers import random_tokens
from foreroute.adapters import hf
from foreroute.trace import RoutingTrace


@dataclass(frozen=True)
class Bench:
    """One model and one batch, whose routes were recorded."""

    routed: hf.RoutedTransformer
    batch: Tensor
    trace: RoutingTrace

    @classmethod
    def of(cls, routed: hf.RoutedTransformer, batch: Tensor) -> Bench:
        """Record it."""
        with routed.record() as recording, torch.no_grad():
            routed.model(input_ids=batch, use_cache=False)
        return cls(routed, batch, recording.trace())

    def forward(self) -> None:
        """Without gradients."""
        with torch.no_grad():
            self.routed.model(input_ids=self.batch, use_cache=False)

    def prefill(self) -> None:
        """A forward that fills a key-value cache."""
        with torch.no_grad():
            self.routed.model(input_ids=self.batch, use_cache=True)

    def step(self) -> None:
        """Forward and backward."""
        self.routed.model.zero_grad(set_to_none=True)
        logits = self.routed.model(input_ids=self.batch, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 0].mean().backward()

    def replayed(self, work: Callable[[], object], *, telemetry: bool = True) -> Callable[[], None]:
        """The same in a session of its own."""

        def run() -> None:
            with self.routed.replay(self.trace, telemetry=telemetry):
                work()

        return run

    def replayed_rows(self, work: Callable[[], object]) -> Callable[[], None]:
        """The same, of routes that were made ready before all, without telemetry."""
        rows = self.routed.rows(self.trace)

        def run() -> None:
            with self.routed.replay(rows):
                work()

        return run

    def recorded(self, work: Callable[[], object], *, margins: bool = False) -> Callable[[], None]:
        """The same, recorded; the routes stay on the device."""

        def run() -> None:
            with self.routed.record(margins=margins):
                work()

        return run


@dataclass(frozen=True)
class Decoding:
    """Sequences whose prompts are in the cache.

    Attributes:
        first: int64 [B, 1], the tokens to go on with.
        mask: int64 [B, prompt + steps], all ones.
        num_steps: tokens that `steps` takes for each.
    """

    routed: hf.RoutedTransformer
    cache: Any
    first: Tensor
    mask: Tensor
    num_steps: int

    @classmethod
    def begin(cls, routed: hf.RoutedTransformer, vocabulary: int, prompts: tuple[int, int], num_steps: int) -> Decoding:
        """Prefill random prompts [B, T]."""
        device = next(routed.model.parameters()).device
        tokens = random_tokens(device, vocabulary, prompts)
        with torch.no_grad():
            output = routed.model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        mask = tokens.new_ones(len(tokens), tokens.shape[1] + num_steps)
        return cls(routed, output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True), mask, num_steps)

    def steps(self) -> None:
        """Decode, ask after each token whether every sequence has ended, and take the cache back to the prompts."""
        token, past = self.first, self.cache.get_seq_length()
        with torch.no_grad():
            for step in range(self.num_steps):
                logits = self.routed.model(
                    input_ids=token,
                    attention_mask=self.mask[:, : past + step + 1],
                    past_key_values=self.cache,
                    use_cache=True,
                ).logits
                token = logits[:, -1].argmax(-1, keepdim=True)
                bool((token < 0).all())
        self.cache.crop(-self.num_steps)

    def recorded(self, *, read: bool = False) -> Callable[[], None]:
        """The same, recorded; with `read`, also brought to the host as a trace."""

        def run() -> None:
            with self.routed.record() as recording:
                self.steps()
            if read:
                recording.trace()

        return run
