"""TRL's own door for engines, `rollout_func`: foreroute's engines behind it, and routes that any function returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Sampling, decode
from foreroute.engines.base import Engine
from foreroute.errors import ConfigError, ReplayError
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trainers.trl.rollout import joined_tokens, require_tokens

ROUTES = "routed_experts"
"""The key under which a `rollout_func` returns routes: a list with one entry for each sequence."""


def rollout_with(engine: Engine) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func` that samples with an engine of foreroute, and returns its routes.

    The engine gets the policy's weights before the first rollout and after every optimizer step. Random numbers come
    from the trainer's seed, the process, the step, and the number of the rollout in it.

    Args:
        engine: one of the policy's model. It stays the caller's to close.

    Returns:
        What `GRPOTrainer(..., rollout_func=...)` takes. Calling it raises `ConfigError` when the trainer's sampling
        settings are not the engine's: engines know no penalty, and not all of them top_p, top_k and min_p.
    """
    rollouts_of: Counter[int] = Counter()

    def roll_out(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        _require_plain(trainer)
        step = int(trainer.state.global_step)
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if engine.weight_version != step:
            engine.load_weights(policy.state_dict(), step)
        # a run that is resumed draws what it would have drawn at its step; a step may have several rollouts
        place = (trainer.args.seed, trainer.accelerator.process_index, step, rollouts_of[step])
        rollouts_of[step] += 1
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        sampling = Sampling(
            trainer.max_completion_length,
            trainer.eos_token_ids[0],
            temperature=trainer.temperature,
            top_k=trainer.top_k or 0,
            top_p=trainer.top_p,
            min_p=trainer.min_p or 0.0,
        )
        generation = engine.generate([np.array(ids, np.int32) for ids in prompt_ids], sampling, generator)
        ends = np.cumsum(generation.response_lengths)[:-1]
        return {
            "prompt_ids": [list(ids) for ids in prompt_ids],
            "completion_ids": [generation.response(s).tolist() for s in range(len(generation))],
            "logprobs": [part.tolist() for part in np.split(generation.logprobs_R, ends)],
            ROUTES: [generation.trace.select([s]) for s in range(len(generation))],
        }

    return roll_out


class FunctionSource:
    """A `rollout_func` that returns its routes beside what TRL asks for.

    Args:
        function: the user's.
        model: the policy, as it is served.
    """

    def __init__(self, function: Callable[..., Any], model: ServedModel) -> None:
        self._function = function
        self._model = model
        self._routes: Any = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL calls; it never sees the routes, which it would hand to reward functions."""
        returned = self._function(prompts, trainer)
        if not isinstance(returned, Mapping):
            raise ReplayError(
                f"the rollout_func returned a {type(returned).__name__}; expected a dictionary, as TRL asks for"
            )
        output = dict(returned)
        self._routes = output.pop(ROUTES, None)
        return output

    def listening(self) -> AbstractContextManager[None]:
        """Nothing: TRL calls the function by itself."""
        self._routes = None
        return nullcontext()

    def captured(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], weight_version: int
    ) -> tuple[RoutingTrace, None]:
        """The routes that came back, each a `RoutingTrace` of one sequence or what `capture.decode` reads."""
        routes = self._routes
        count = (
            len(routes) if isinstance(routes, Collection) and not isinstance(routes, str | bytes | Mapping) else None
        )
        if count is None or count != len(prompts):
            found = "no" if routes is None else f"a {type(routes).__name__} as" if count is None else count
            raise ReplayError(
                f"the rollout_func returned {found} {ROUTES!r} for {len(prompts)} sequences; expected a list of as "
                "many, each a RoutingTrace or what foreroute.capture.decode reads"
            )
        sequences = joined_tokens(prompts, completions)
        traces = [
            each
            if isinstance(each, RoutingTrace)
            else decode(
                each,
                model=self._model.spec,
                token_ids=[tokens],
                vocabulary_size=self._model.vocabulary_size,
                indexers=self._model.indexers,
                weight_version=weight_version,
            )
            for each, tokens in zip(routes, sequences, strict=True)
        ]
        trace = concatenate(traces)
        require_tokens(trace, sequences)
        return trace, None


def _require_plain(trainer: Any) -> None:
    if trainer.repetition_penalty != 1:
        raise ConfigError(
            f"repetition_penalty is {trainer.repetition_penalty}, which foreroute's engines do not sample with; leave "
            "it at 1.0, or sample with TRL's own engines"
        )
    if trainer.args.generation_kwargs:
        raise ConfigError("generation_kwargs are not those of foreroute's engines; leave them out")
    if len(trainer.eos_token_ids) != 1:
        raise ConfigError(
            f"the model ends a response with any of {trainer.eos_token_ids}; foreroute's engines know one end token"
        )
    if is_peft_model(trainer.model):
        raise ConfigError(
            "the policy has PEFT adapters, whose weights foreroute's engines do not load; sample with TRL's own engines"
        )
