"""TRL's own door for rollouts, `rollout_func`: foreroute's engines, and what any function returns with routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Generation, Sampling, decode
from foreroute.engines.base import Engine
from foreroute.errors import ConfigError, ReplayError
from foreroute.trace import RoutingTrace, concatenate

ROUTES = "routed_experts"
"""The key under which a `rollout_func` returns routes: a list with one entry for each sequence."""


def rollout_with(engine: Engine) -> EngineSource:
    """Sample with an engine of the policy's model: what `GRPOTrainer(..., rollout_func=...)` takes, also with tools.

    The engine, which stays the caller's to close, gets the policy's weights before the first rollout and after every
    optimizer step. Random numbers come from the trainer's seed, the process, the step, and the number of the turn in
    it. What is returned is also a function (prompts, trainer), for a `rollout_func` of your own.

    Sampling raises `ConfigError` when the trainer's sampling settings are not the engine's: engines know no penalty,
    and not all of them top_p, top_k and min_p.
    """
    return EngineSource(engine)


def rollout_output(generation: Generation) -> dict[str, Any]:
    """Give what a `rollout_func` returns for S sequences of an engine or of an agent's records, in TRL's order.

    These are lists of S entries: prompt_ids, completion_ids, logprobs (0 where nothing was sampled), env_mask and
    routed_experts. Exactly the sampled tokens have a part in the loss. TRL takes one sequence for each prompt that it
    gave, so that a rollout of several branches fills several places of its group.
    """
    trace, sampled_N = generation.trace, generation.sampled_N
    logprobs_N = np.zeros(len(sampled_N), np.float32)
    logprobs_N[sampled_N] = generation.logprobs_R
    output: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask", ROUTES)
    }
    for s, prompt in enumerate(generation.prompt_lengths.tolist()):
        behind = slice(int(trace.offsets[s]) + prompt, int(trace.offsets[s + 1]))
        output["prompt_ids"].append(trace.tokens(s)[:prompt].tolist())
        output["completion_ids"].append(trace.tokens(s)[prompt:].tolist())
        output["logprobs"].append(logprobs_N[behind].tolist())
        output["env_mask"].append(sampled_N[behind].astype(int).tolist())
        output[ROUTES].append(trace.select([s]))
    return output


class EngineSource:
    """Turns that an engine of foreroute samples; see `rollout_with`."""

    trainer: Any  # TRL's, whose weights and settings they are sampled with

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loaded_from: Any = None  # the trainer whose weights the engine has
        self._turns_of: Counter[int] = Counter()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Give what a `rollout_func` returns."""
        self.trainer = trainer
        return rollout_output(self.sample(trainer._tokenize_prompts(prompts)[0]))

    def sample(self, prompt_ids: Sequence[Sequence[int]]) -> Generation:
        """Sample one turn for each prompt."""
        trainer = self.trainer
        # before TRL 1.14 that of the tokenizer is the only one
        ends = getattr(trainer, "eos_token_ids", [trainer._tokenizer.eos_token_id])
        _require_known_settings(trainer, ends)
        step = int(trainer.state.global_step)
        # a version is the step of its trainer; the engine may have sampled for another one
        if self._engine.weight_version != step or self._loaded_from is not trainer:
            policy = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
            self._engine.load_weights(_gathered_weights(policy), step)
            self._loaded_from = trainer
        # a run that is resumed draws what it would have drawn at its step; a step may have several turns
        turn = (trainer.args.seed, trainer.accelerator.process_index, step, self._turns_of[step])
        self._turns_of[step] += 1
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(turn).generate_state(1)[0]))
        sampling = Sampling(
            trainer.max_completion_length,
            ends[0],
            temperature=trainer.temperature,
            top_k=trainer.top_k or 0,
            top_p=trainer.top_p,
            min_p=trainer.min_p or 0.0,
        )
        return self._engine.generate([np.array(ids, np.int32) for ids in prompt_ids], sampling, generator)


def require_mapping(returned: object) -> dict[str, Any]:
    """Copy the dictionary that a `rollout_func` returned. Raises `ReplayError` for anything else."""
    if not isinstance(returned, Mapping):
        raise ReplayError(
            f"the rollout_func returned a {type(returned).__name__}; expected a dictionary, as TRL asks for"
        )
    return dict(returned)


def returned_trace(
    routes: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    model: ServedModel,
    weight_version: int,
) -> RoutingTrace:
    """Read the routes that a `rollout_func` returned, each a trace of one sequence or what `capture.decode` reads."""
    is_list = isinstance(routes, Collection) and not isinstance(routes, str | bytes | Mapping)
    if not is_list or len(routes) != len(prompts):
        found = "no" if routes is None else len(routes) if is_list else f"a {type(routes).__name__} as"
        raise ReplayError(
            f"the rollout_func returned {found} {ROUTES!r} for {len(prompts)} sequences; expected a list of as "
            "many, each a RoutingTrace or what foreroute.capture.decode reads"
        )
    return concatenate(
        each
        if isinstance(each, RoutingTrace)
        else decode(
            each,
            model=model.spec,
            token_ids=[tokens],
            vocabulary_size=model.vocabulary_size,
            indexers=model.indexers,
            weight_version=weight_version,
        )
        for each, tokens in zip(routes, join_tokens(prompts, completions), strict=True)
    )


def join_tokens(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[NDArray[np.int32]]:
    """Give S arrays int32 [T], prompt and completion."""
    return [np.array([*p, *c], np.int32) for p, c in zip(prompts, completions, strict=True)]


def _gathered_weights(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the `state_dict()` of the policy, one of ZeRO-3 gathered at a time; engines gather those of FSDP2."""
    for name, weight in policy.state_dict(keep_vars=True).items():
        whole = weight.detach()
        if hasattr(weight, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([weight]):
                whole = weight.detach().to("cpu", copy=True)  # what is gathered is let go behind the context
        yield name, whole


def _require_known_settings(trainer: Any, ends: Sequence[int]) -> None:
    if trainer.repetition_penalty != 1:
        raise ConfigError(
            f"repetition_penalty is {trainer.repetition_penalty}, which foreroute's engines do not sample with; leave "
            "it at 1.0, or sample with TRL's own engines"
        )
    if trainer.args.generation_kwargs:
        raise ConfigError("generation_kwargs are not those of foreroute's engines; leave them out")
    if len(ends) != 1:
        raise ConfigError(f"the model ends a response with any of {ends}; foreroute's engines know one end token")
    if is_peft_model(trainer.model):
        raise ConfigError(
            "the policy has PEFT adapters, whose weights foreroute's engines do not load; sample with TRL's own engines"
        )
