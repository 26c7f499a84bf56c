"""What every engine outside the trainer's process shares: sequences as it returned them, checked and made a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.hf import RoutedModel
from foreroute.capture import Generation, ModelFacts, decode
from foreroute.errors import EngineError
from foreroute.trace import NO_VERSION, RoutingTrace, concatenate


@dataclass(frozen=True, eq=False)
class Sampled:
    """One sequence of an engine.

    Attributes:
        prompt: int32 [P], what the engine was given.
        response: int32 [R], what it sampled.
        logprobs: float32 [R].
        output: what carries the routes, in a form that `capture.decode` reads, or None when nothing ran.
        start: the position of the first row in it.
        finished: False when it was aborted.
    """

    prompt: NDArray[np.int32]
    response: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    output: Any
    start: int = 0
    finished: bool = True

    def trace(self, facts: ModelFacts, *, weight_version: int, engine: str, engine_version: str) -> RoutingTrace:
        """The routes of this sequence, checked.

        Raises:
            EngineError: when there is not one finite log-prob for each token, or a token is none of the model's.
            CaptureError: when the routes are missing, misplaced, or cannot be true.
        """
        if len(self.logprobs) != len(self.response):
            raise EngineError(f"the engine returned {len(self.logprobs)} log-probs for {len(self.response)} tokens")
        if not np.isfinite(self.logprobs).all():
            raise EngineError("the engine returned a log-prob that is no finite number; its weights may be damaged")
        _require_known(self.response, facts.vocabulary_size)
        tokens = np.concatenate([self.prompt, self.response])
        if self.output is None and not self.finished:
            return RoutingTrace.unrouted(facts.spec, [tokens])
        return decode(
            self.output,
            model=facts,
            token_ids=tokens,
            start=self.start,
            weight_version=weight_version,
            engine=engine,
            engine_version=engine_version,
        )


def generation_of(
    sequences: Sequence[Sampled], facts: ModelFacts, *, weight_version: int, engine: str, engine_version: str
) -> Generation:
    """All sequences, in order, for training. Raises as `Sampled.trace`."""
    traces = [
        s.trace(facts, weight_version=weight_version, engine=engine, engine_version=engine_version) for s in sequences
    ]
    return Generation(
        concatenate(traces),
        np.array([len(s.prompt) for s in sequences], np.int64),
        np.concatenate([s.logprobs for s in sequences]),
    )


def facts_of(routed: RoutedModel) -> ModelFacts:
    """Its spec, how many decoder layers an engine counts, and its vocabulary."""
    config: Any = routed.model.config
    text = config.get_text_config()
    return ModelFacts(routed.spec, int(text.num_hidden_layers), int(text.vocab_size))


def draw_seeds(generator: torch.Generator, count: int) -> NDArray[np.int64]:
    """int64 [count], a seed for each request. Engines add the number of the response within its group."""
    return torch.randint(1 << 31, (count,), generator=generator).numpy()


def require_same_prompt(sent: NDArray[np.int32], echoed: Sequence[int] | None) -> None:
    """Raise `EngineError` when an engine says that it was given another prompt than it was sent."""
    if echoed is not None and not np.array_equal(sent, echoed):
        raise EngineError(
            f"the engine ran on the prompt {list(echoed)[:8]}..., it was sent {sent[:8].tolist()}...: it puts prompts "
            "through a tokenizer or template of its own. Start it on the trainer's checkpoint, with nothing between"
        )


def _require_known(tokens: NDArray[np.int32], vocabulary_size: int | None) -> None:
    unknown = np.flatnonzero((tokens < 0) | (tokens >= (vocabulary_size or np.inf)))
    if len(unknown):
        raise EngineError(
            f"the engine sampled token {tokens[unknown[0]]}, the policy knows those below {vocabulary_size}: "
            "the engine runs another model or vocabulary. Start it on the trainer's checkpoint"
        )


def require_version(stated: str, expected: int) -> None:
    """Raise `EngineError` unless an engine that was given weights sampled with those."""
    if expected != NO_VERSION and stated != str(expected):
        raise EngineError(
            f"the engine sampled with weights of version {stated!r}, the trainer loaded version {expected}; "
            "no one else may change the weights of an engine that a trainer uses"
        )
