"""Routes of TRL's generations: each turn is captured where it is sampled, and turns are joined to a rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from foreroute.adapters.checkpoint import ServedModel
from foreroute.adapters.hf import RoutedTransformer
from foreroute.errors import BatchMismatchError, ForerouteError, StaleTraceError
from foreroute.trace import NO_VERSION, RoutingTrace
from foreroute.trainers.trl.capture_generate import GenerateSource
from foreroute.trainers.trl.capture_vllm import VLLMSource
from foreroute.trainers.trl.rollout import Rollout
from foreroute.trainers.trl.rollout_func import ROUTES, EngineSource, require_mapping, returned_trace
from foreroute.trainers.trl.sampling import require_masks
from foreroute.trainers.trl.turns import Turn, TurnSource, join_tokens, join_turns

LOG = logging.getLogger(__name__)

Replay = Literal["none", "R2", "R3"]
Result = TypeVar("Result")


class MeasuringGuard:
    """Lets errors through where replay was asked for. Under "none" the first one is logged, and measuring is off."""

    def __init__(self, replay: Replay) -> None:
        self.is_on = True  # False only under "none"
        self._raises = replay != "none"

    def run(self, function: Callable[..., Result], *args: Any) -> Result | None:
        """Call what measures, and return its result; None where measuring is off, or goes off."""
        if self._raises:
            return function(*args)
        if self.is_on:
            with self.catching_errors():
                return function(*args)
        return None

    @contextmanager
    def catching_errors(self) -> Iterator[None]:
        try:
            yield
        except ForerouteError as error:
            if self._raises:
                raise
            if self.is_on:
                LOG.warning("replay='none' measures no mismatch from here on, and trains as TRL does. %s", error)
            self.is_on = False


class RolloutCapture:
    """Captures the rollouts of one trainer. `routed` is None where the policy cannot be measured."""

    def __init__(self, trainer: Any, routed: RoutedTransformer | None, replay: Replay, guard: MeasuringGuard) -> None:
        self._trainer, self._replay, self._guard = trainer, replay, guard
        self._turns: list[Turn] = []
        self._source: TurnSource | None = None
        if isinstance(source := trainer.rollout_func, EngineSource):
            # a turn is sampled where TRL samples one, so that tools are TRL's to call
            self._source, trainer.rollout_func, source.trainer = source, None, trainer
        with guard.catching_errors():
            if routed is not None:
                self._routed, self._served = routed, ServedModel.of(routed)
                if trainer.rollout_func is not None:
                    trainer.rollout_func = partial(self._run_rollout_func, trainer.rollout_func)
                elif self._source is None and replay != "R2":
                    self._source = self._find_source()

    @property
    def is_open(self) -> bool:
        """Whether what is sampled now is trained on with its routes; R2 needs none of a rollout."""
        return self._guard.is_on and bool(self._trainer.model.training) and self._replay != "R2"

    def capture_rollout(self, generate: Callable[[], Any]) -> tuple[Any, Rollout | None]:
        """Run TRL's `_generate`, and join the turns that were captured in it."""
        self._turns = []
        result = generate()
        return result, self._guard.run(self._join_rollout, *result[:3]) if self.is_open else None

    def capture_turn(self, sample: Callable[[], Any], prompts: Sequence[Sequence[int]]) -> Any:
        """Run TRL's `_generate_single_turn`, on the prompts of a rollout or on what it goes on with behind tools."""
        if self._source is None or not (self.is_open or isinstance(self._source, EngineSource)):
            return sample()
        result, captured = self._source.turn(sample, prompts, self._version)
        if self.is_open:
            self._guard.run(lambda: self._add_turn(prompts, *captured()))
        return result

    @property
    def _version(self) -> int:
        """What rollouts of the weights of now are stamped with."""
        return int(self._trainer.state.global_step)

    def _find_source(self) -> TurnSource:
        trainer, replays = self._trainer, self._replay == "R3"
        if trainer.use_vllm:
            return VLLMSource(trainer.vllm_generation, trainer.accelerator, self._served)
        return GenerateSource(
            self._routed,
            indexers=replays and self._routed.indexers is not None,
            temperature=trainer.temperature if replays else None,
        )

    def _run_rollout_func(self, function: Callable[..., Any], prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = require_mapping(function(prompts, trainer))
        routes = output.pop(ROUTES, None)  # TRL would hand them to reward functions
        if self.is_open and {"prompt_ids", "completion_ids"} <= output.keys():  # TRL says what is missing
            prompts, completions = output["prompt_ids"], output["completion_ids"]
            read = partial(returned_trace, routes, prompts, completions, self._served, self._version)
            self._guard.run(lambda: self._add_turn(prompts, read()))
        return output

    def _add_turn(self, prompts: Sequence[Sequence[int]], trace: RoutingTrace, logprobs: Any = None) -> None:
        self._turns.append(Turn([len(each) for each in prompts], trace, logprobs))

    def _join_rollout(self, prompts: Sequence[Any], completions: Sequence[Any], env_masks: Any) -> Rollout:
        prompt_lengths = [len(each) for each in prompts]
        trace, logprobs = join_turns(self._turns, join_tokens(prompts, completions), prompt_lengths)
        trace = self._routed.with_lookups(trace)
        require_version(trace, self._version)
        if self._replay == "R3":
            require_masks(self._trainer, trace)
            _require_lengths(env_masks, completions)
        return Rollout(trace, np.array(prompt_lengths), logprobs, env_masks)


def require_version(trace: RoutingTrace, weight_version: int) -> None:
    """Raise `StaleTraceError` when routes say that they are of other weights than the rollout's."""
    others = sorted(set(trace.versions) - {NO_VERSION, weight_version})
    if others:
        raise StaleTraceError(
            f"routes of weight versions {others} came with the rollout of step {weight_version}; return those of the "
            "weights that sampled the tokens, or state no version"
        )


def _require_lengths(env_masks: Sequence[Sequence[int]] | None, completions: Sequence[Sequence[int]]) -> None:
    """Raise `BatchMismatchError` unless each `env_mask` of a `rollout_func` is as long as its completion."""
    found, expected = (None if given is None else [len(each) for each in given] for given in (env_masks, completions))
    if found is not None and found != expected:
        raise BatchMismatchError(
            f"the rollout_func returned env_mask of the lengths {found} for completions of {expected}; return one "
            "number for each token, 1 where it was sampled"
        )
