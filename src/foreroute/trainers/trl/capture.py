"""Routes of TRL's generations: each turn is captured where it is sampled, and turns are joined to a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel
from foreroute.adapters.hf import RoutedTransformer
from foreroute.errors import BatchMismatchError, ReplayError, StaleTraceError
from foreroute.trace import NO_VERSION, RoutingTrace, concatenate, extended
from foreroute.trainers.trl.capture_generate import GenerateSource
from foreroute.trainers.trl.capture_vllm import VLLMSource
from foreroute.trainers.trl.rollout import Rollout
from foreroute.trainers.trl.rollout_func import (
    ROUTES,
    EngineSource,
    join_tokens,
    require_mapping,
    returned_trace,
    rollout_output,
)
from foreroute.trainers.trl.settings import Replay, require_masks

if TYPE_CHECKING:
    from foreroute.trainers.trl.controller import MeasuringGuard


class Turn(NamedTuple):
    """Result of one request to an engine: a whole rollout, or what is sampled behind the answers of tools."""

    prompt_lengths: Sequence[int]  # of each of its sequences, tokens that the engine was given
    trace: RoutingTrace  # of these tokens, and of those that were sampled
    logprobs: Sequence[NDArray[np.float32]] | None = None  # of each, [R]; None where the source has not seen them


class RolloutCapture:
    """Captures the rollouts of one trainer. `routed` is None where the policy cannot be measured.

    A turn is sampled by `engine`, an engine of foreroute that is asked in the place of TRL's; or by one of TRL, which
    `source` watches; or by the trainer's own `rollout_func`, which returns routes.
    """

    def __init__(self, trainer: Any, routed: RoutedTransformer | None, replay: Replay, guard: MeasuringGuard) -> None:
        self.engine: EngineSource | None = None
        self.source: GenerateSource | VLLMSource | None = None  # watched while it samples a turn
        self._trainer, self._replay, self._guard = trainer, replay, guard
        self._turns: list[Turn] = []
        if isinstance(function := trainer.rollout_func, EngineSource):
            # a turn is sampled where TRL samples one, so that tools are TRL's to call
            self.engine, trainer.rollout_func, function.trainer = function, None, trainer
        needs_source = self.engine is None and replay != "R2"
        with guard:
            if routed is not None:
                self._routed, self._served = routed, ServedModel.of(routed)
                if trainer.rollout_func is not None:
                    trainer.rollout_func = partial(self._run_rollout_func, trainer.rollout_func)
                elif needs_source and trainer.use_vllm:
                    self.source = VLLMSource(trainer.vllm_generation, trainer.accelerator, self._served)
                elif needs_source:
                    self.source = GenerateSource(
                        routed,
                        indexers=replay == "R3" and routed.indexers is not None,
                        temperature=trainer.temperature if replay == "R3" else None,
                    )

    @property
    def is_open(self) -> bool:
        """Say whether what is sampled now is trained on with its routes; R2 needs none of a rollout."""
        return self._guard.is_on and bool(self._trainer.model.training) and self._replay != "R2"

    def begin_rollout(self) -> None:
        """Forget the turns of a generation that an error ended."""
        self._turns = []
        if isinstance(self.source, GenerateSource):
            self.source.begin_rollout()

    def take_turn(self, prompts: Sequence[Sequence[int]], sample: Callable[[], Any]) -> Any:
        """Sample a turn, with `engine` or as TRL does; give what TRL's `_generate_single_turn` returns."""
        if self.engine is not None:
            generation = self.engine.sample(prompts)
            if self.is_open:
                with self._guard:
                    self._add_turn(prompts, generation.trace)
            output = rollout_output(generation)
            return output["completion_ids"], output["logprobs"]
        if self.source is None or not self.is_open:
            return sample()
        with self.source.watching():
            result = sample()
        with self._guard:
            self._add_turn(prompts, *self.source.read(prompts, result[0], self._version))
        return result

    def join_rollout(self, prompts: Sequence[Any], completions: Sequence[Any], env_masks: Any) -> Rollout:
        """Join the turns that were captured to the sequences that TRL trains on. Raises where they do not fit."""
        if isinstance(self.source, GenerateSource):
            self.source.require_unmoved()
        prompt_lengths = [len(each) for each in prompts]
        trace, logprobs = join_turns(self._turns, join_tokens(prompts, completions), prompt_lengths)
        trace = self._routed.with_lookups(trace)
        require_version(trace, self._version)
        if self._replay == "R3":
            require_masks(self._trainer, trace)
            _require_lengths(env_masks, completions)
        return Rollout(trace, np.array(prompt_lengths), logprobs, env_masks)

    @property
    def _version(self) -> int:
        """Version that rollouts of the weights of now are stamped with."""
        return int(self._trainer.state.global_step)

    def _run_rollout_func(self, function: Callable[..., Any], prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = require_mapping(function(prompts, trainer))
        routes = output.pop(ROUTES, None)  # TRL would hand them to reward functions
        if self.is_open and {"prompt_ids", "completion_ids"} <= output.keys():  # TRL says what is missing
            prompts, completions = output["prompt_ids"], output["completion_ids"]
            with self._guard:
                self._add_turn(prompts, returned_trace(routes, prompts, completions, self._served, self._version))
        return output

    def _add_turn(self, prompts: Sequence[Sequence[int]], trace: RoutingTrace, logprobs: Any = None) -> None:
        self._turns.append(Turn([len(each) for each in prompts], trace, logprobs))


def join_turns(
    turns: Sequence[Turn], sequences: Sequence[NDArray[np.int32]], prompt_lengths: Sequence[int]
) -> tuple[RoutingTrace, list[NDArray[np.float32]] | None]:
    """Join the turns of a rollout to its S sequences [T]: of a row that several of them routed, the first one's routes.

    What stands between two turns, such as the answer of a tool, and the last token of a turn are routed by the turn
    behind them, of which they are a part of the prompt. Log-probs [T - prompt] are NaN where nothing was sampled, and
    None where a turn has none.
    """
    if not turns:
        raise ReplayError(
            "TRL sampled a rollout past _generate_single_turn and rollout_func, so that its routes are unknown; return "
            "them from a rollout_func, or take replay='R2'"
        )
    captures = [[RoutingTrace.unrouted(turns[0].trace.spec, [[]])] for _ in sequences]
    logprobs = [np.full(len(tokens), np.nan, np.float32) for tokens in sequences]
    for turn in turns:
        for number, s in enumerate(_match_sequences(turn, sequences)):
            captures[s].append(turn.trace.select([number]))
            if turn.logprobs is not None:
                behind = logprobs[s][turn.prompt_lengths[number] :]
                behind[: len(turn.logprobs[number])] = turn.logprobs[number][: len(behind)]
    whole = concatenate(extended(*each) for each in captures)
    lengths = np.array([len(tokens) for tokens in sequences])
    if len(short := np.flatnonzero(whole.lengths < lengths)):
        raise BatchMismatchError(
            f"TRL trains on {lengths[short[0]]} tokens of sequence {short[0]}, and the turns that were captured end at "
            f"{whole.lengths[short[0]]}: something between the engine and the trainer added tokens"
        )
    # TRL cuts the last turn of a sequence that is longer than max_completion_length
    trace = whole.truncated(lengths)
    if any(turn.logprobs is None for turn in turns):
        return trace, None
    return trace, [each[prompt:] for each, prompt in zip(logprobs, prompt_lengths, strict=True)]


def require_version(trace: RoutingTrace, weight_version: int) -> None:
    """Raise `StaleTraceError` when routes say that they are of other weights than the rollout's."""
    others = sorted(set(trace.versions) - {NO_VERSION, weight_version})
    if others:
        raise StaleTraceError(
            f"routes of weight versions {others} came with the rollout of step {weight_version}; return those of the "
            "weights that sampled the tokens, or state no version"
        )


def _match_sequences(turn: Turn, sequences: Sequence[NDArray[np.int32]]) -> Iterator[int]:
    """Yield the numbers of the sequences that a turn went on with, which hold its prompt and some of its samples."""
    # equal turns of equal prompts are told apart by their order alone, which TRL keeps: no number comes twice
    numbers = iter(range(len(sequences)))
    for own, prompt_length in enumerate(turn.prompt_lengths):
        tokens = turn.trace.tokens(own)
        for s in numbers:
            trained = sequences[s]
            if len(trained) >= prompt_length and np.array_equal(tokens[: len(trained)], trained[: len(tokens)]):
                yield s
                break
        else:
            raise BatchMismatchError(
                f"sequence {own} of a turn, {len(tokens)} tokens, is the beginning of none of the {len(sequences)} "
                "sequences that TRL trains on: something between the engine and the trainer reordered, cut or "
                "retokenised them"
            )


def _require_lengths(env_masks: Sequence[Sequence[int]] | None, completions: Sequence[Sequence[int]]) -> None:
    """Raise `BatchMismatchError` unless each `env_mask` of a `rollout_func` is as long as its completion."""
    found, expected = (None if given is None else [len(each) for each in given] for given in (env_masks, completions))
    if found is not None and found != expected:
        raise BatchMismatchError(
            f"the rollout_func returned env_mask of the lengths {found} for completions of {expected}; return one "
            "number for each token, 1 where it was sampled"
        )
