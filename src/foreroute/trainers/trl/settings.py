"""Settings of TRL that replay does not go with, and those that rollouts are sampled with.

TRL's own settings are overlaid by `generation_kwargs`; `generate` fills in what is left from the model's
`generation_config`. Under R3, what only leaves tokens out is scored on the sets. What moves the others is refused.
"""

from __future__ import annotations

from typing import Any, Literal

from accelerate.utils import is_peft_model
from trl.generation.vllm_client import VLLMClient
from trl.trainer import utils

from foreroute.errors import ReplayError
from foreroute.trace import SAMPLING, RoutingTrace
from foreroute.trainers.checks import Refusals, refuse
from foreroute.trainers.trl.rollout_func import EngineSource

Replay = Literal["none", "R2", "R3"]

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


def require_supported(trainer: Any, replay: Replay) -> None:
    """Raise `ConfigError` naming all settings of a trainer, set up by TRL, that replay does not go with."""
    refuse("", [*_refusals(trainer, replay), *(_unscored(trainer) if replay == "R3" else ())])


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


def _refusals(trainer: Any, replay: Replay) -> Refusals:
    args, captures = trainer.args, replay != "R2"
    generates = captures and not trainer.use_vllm and trainer.rollout_func is None
    beams = generates and (trainer.generation_config.num_beams or trainer.model.generation_config.num_beams or 1)
    paged = "use_transformers_continuous_batching"
    if not hasattr(trainer, paged):  # before TRL 1.7
        paged = "use_transformers_paged"
    serves = captures and trainer.use_vllm and trainer.rollout_func is None and trainer.vllm_mode == "server"
    headless = not hasattr(utils, "add_fused_lm_head")
    newer = "{} is not replayed before TRL {}; install a newer one, or do without".format
    turns = captures and bool(trainer.tools) and not isinstance(trainer.rollout_func, EngineSource)
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    prompt_learning = is_peft_model(trainer.model) and any(
        config.is_prompt_learning for config in trainer.model.peft_config.values()
    )
    return [
        (
            fsdp is not None and getattr(fsdp, "fsdp_version", 1) == 1,
            "accelerate runs FSDP1 on GPUs alone, where replay under TRL was never tested; set fsdp_version: 2 in the "
            "configuration of accelerate, or take DeepSpeed",
        ),
        (
            replay != "none" and args.torch_compile_backend == "eager" and args.gradient_checkpointing,
            "torch_compile_backend 'eager' cannot recompute what was replayed; take 'inductor' or 'aot_eager', or set "
            "gradient_checkpointing=False",
        ),
        # older releases have a server of their own, a loss of Liger, and log-probs from all logits
        (serves and not hasattr(VLLMClient, "_post"), newer("vllm_mode='server'", "1.11")),
        (headless and args.use_liger_kernel, newer("use_liger_kernel", "1.15")),
        (headless and replay == "R3" and cuts_of(trainer), newer("sampling by top_p, top_k or min_p", "1.15")),
        (
            prompt_learning,
            "PEFT's prompt and prefix tuning put positions before the sequence that are no tokens, so that routes and "
            "batch cannot be checked to belong together; use LoRA",
        ),
        (
            beams > 1,
            f"num_beams is {beams}, and beams change their places after they were routed; sample with num_beams=1, or "
            "take replay='R2'",
        ),
        (
            generates and getattr(trainer, paged),
            f"{paged} generates over paged batches, whose routes cannot be recorded; leave it off, sample with vLLM or "
            "a rollout_func, or take replay='R2'",
        ),
        (
            turns and trainer.rollout_func is not None,
            "TRL samples what follows a tool's answer with its own engine, not with the rollout_func; call the tools "
            "in the rollout_func and return env_mask, or take rollout_with(engine)",
        ),
        (
            turns
            and trainer.use_vllm
            and trainer.accelerator.num_processes > 1
            and (trainer.vllm_mode == "server" or trainer.vllm_tensor_parallel_size > 1),
            "TRL deals the answers of a vLLM that serves several processes out in equal shares, and with tools the "
            "processes ask for unequal numbers; take vllm_mode='colocate' with a tensor_parallel_size of 1",
        ),
    ]


def _unscored(trainer: Any) -> Refusals:
    """List settings of sampling under which R3 would score other log-probs than those of the rollout."""
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
