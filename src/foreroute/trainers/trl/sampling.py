"""What rollouts are sampled with under R3, and whether a temperature and sampling masks say all of it.

TRL's own settings are overlaid by `generation_kwargs`; `generate` fills in what is left from the model's
`generation_config`. What only leaves tokens out is scored on the sets. What moves the others is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from foreroute.errors import ConfigError, ReplayError
from foreroute.trace import SAMPLING, RoutingTrace

CUTS = ("top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "repetition_penalty": (None, 1),
}
"""Values under which a setting does nothing; of others those that are false."""

WITHOUT_EFFECT = frozenset(
    [
        "detokenize",
        "ignore_eos",
        "include_stop_str_in_output",
        "logprobs",
        "max_tokens",
        "n",
        "repetition_detection",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
    ]
)
"""Settings of vLLM that change no probability; the temperature is looked at by itself."""

LEAVING_OUT = frozenset(
    [
        "EncoderNoRepeatNGramLogitsProcessor",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    ]
)
"""Processors of transformers that put scores to minus infinity and keep the distances of all others."""
NORMALIZING = "LogitNormalization"
TEMPERATURE = "TemperatureLogitsWarper"


def settings_of(trainer: Any) -> dict[str, Any]:
    """Give the settings of sampling that TRL hands to its engines, those that do nothing left out."""
    own = {name: getattr(trainer, name) for name in (*CUTS, "temperature", "repetition_penalty")}
    if trainer.use_vllm:
        own["structured_outputs_regex"] = trainer.args.vllm_structured_outputs_regex
    given = own | (trainer.args.generation_kwargs or {})
    return {name: value for name, value in given.items() if not _does_nothing(name, value)}


def cuts_of(trainer: Any) -> dict[str, Any]:
    """Give the settings that leave tokens out and that every source of sampling masks knows."""
    settings = settings_of(trainer)
    return {name: settings[name] for name in CUTS if name in settings}


def require_masks(trainer: Any, trace: RoutingTrace) -> None:
    """Raise `ReplayError` when a rollout has no sampling masks, and the trainer's settings leave tokens out."""
    cuts = cuts_of(trainer)
    if cuts and SAMPLING not in trace.streams:
        raise ReplayError(
            f"{_shown(cuts)} leave tokens out, and the rollout has no sampling masks, so that R3 would score over all "
            "tokens; return traces that have them from the rollout_func, or leave the settings out"
        )


def refusals(trainer: Any) -> list[tuple[object, str]]:
    """List what scoring under R3 does not go with: whether a trainer, set up, has it, and the message."""
    settings, cuts = settings_of(trainer), _shown(cuts_of(trainer))
    served = trainer.use_vllm and trainer.rollout_func is None
    moving = {
        name: value
        for name, value in settings.items()
        if name in PENALTIES or (served and name not in WITHOUT_EFFECT.union(CUTS))
    }
    temperature = settings.get("temperature")
    return [
        (moving, _unseen_by_masks(_shown(moving))),
        (temperature != trainer.temperature, _another_temperature(temperature, trainer.temperature)),
        (
            served and cuts and trainer.vllm_mode == "server",
            f"{cuts} leave tokens out, and the answers that TRL asks a vLLM server for have no sampling masks; take "
            "vllm_mode='colocate' or a rollout_func, or leave them out",
        ),
        (
            served and cuts and "top_k" not in settings,
            f"{cuts} leave tokens out, and vLLM returns sampling masks of requests with a top_k alone; set it, to the "
            "size of the vocabulary where it should leave nothing out",
        ),
    ]


def leaves_out(processors: Iterable[Any], temperature: float) -> bool:
    """Say whether the processors that `generate` puts scores through leave tokens out.

    Raises `ConfigError` when they change scores in another way, or by another temperature than log-probs are scored at.
    """
    by_name = {type(each).__name__: each for each in processors}
    moving = sorted(by_name.keys() - LEAVING_OUT - {NORMALIZING, TEMPERATURE})
    if moving:
        raise ConfigError(
            _unseen_by_masks(f"{', '.join(moving)}, by generation_kwargs or the model's generation_config,")
        )
    found = by_name[TEMPERATURE].temperature if TEMPERATURE in by_name else 1.0
    if found != temperature:
        raise ConfigError(_another_temperature(found, temperature))
    # a min_p of 0 leaves nothing out, and sets of the whole vocabulary are large
    return any(name in LEAVING_OUT and getattr(each, "min_p", None) != 0 for name, each in by_name.items())


def _does_nothing(name: str, value: Any) -> bool:
    return value in NEUTRAL[name] if name in NEUTRAL else not value


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())


def _unseen_by_masks(what: str) -> str:
    return (
        f"{what} changes log-probs in a way that no sampling mask shows, so that R3 would score others than those that "
        "tokens were drawn with; leave it out, or take replay='R2'"
    )


def _another_temperature(found: Any, scored: float) -> str:
    return (
        f"rollouts are sampled at temperature {found}, and TRL scores at {scored}; set temperature in GRPOConfig, and "
        "leave it and do_sample out of generation_kwargs"
    )
