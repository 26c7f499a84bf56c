"""Settings under which replay is not supported, or would silently have no effect. One message for each."""

from __future__ import annotations

from typing import Any, get_args

from accelerate.utils import is_peft_model

from foreroute.errors import ConfigError
from foreroute.trainers.trl.passes import Replay


def require_mode(replay: str) -> None:
    """Raise `ConfigError` for a mode that does not exist."""
    if replay not in get_args(Replay):
        raise ConfigError(f"replay is {replay!r}; expected one of {', '.join(map(repr, get_args(Replay)))}")


def require_supported(trainer: Any, replay: Replay) -> None:
    """Raise `ConfigError` naming the first setting of a trainer that replay does not go with.

    Args:
        trainer: TRL's trainer, after its own set-up.
        replay: what was asked for.
    """
    for refused, message in [*_always(trainer), *(_in_r2(trainer) if replay == "R2" else _with_rollout(trainer))]:
        if refused:
            raise ConfigError(message)


def _always(trainer: Any) -> list[tuple[bool, str]]:
    args = trainer.args
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    prompt_learning = is_peft_model(trainer.model) and any(
        config.is_prompt_learning for config in trainer.model.peft_config.values()
    )
    return [
        (
            bool(getattr(args, "use_liger_kernel", False) or getattr(args, "use_liger_loss", False)),
            "use_liger_kernel replaces modules of the model when training starts, after replay was proven on it; "
            "leave it off",
        ),
        (
            trainer.is_deepspeed_enabled,
            "DeepSpeed takes the model apart between forwards, and replay was never tested under it; use DDP or FSDP2",
        ),
        (
            fsdp is not None and getattr(fsdp, "fsdp_version", 1) == 1,
            "FSDP1 was never tested with replay; set fsdp_version: 2 in the configuration of accelerate",
        ),
        (
            prompt_learning,
            "PEFT's prompt and prefix tuning put positions before the sequence that are no tokens, so that routes and "
            "batch cannot be checked to belong together; use LoRA",
        ),
    ]


def _with_rollout(trainer: Any) -> list[tuple[bool, str]]:
    """What the capture of rollouts does not go with."""
    tools = bool(getattr(trainer, "tools", None)) or getattr(trainer, "environment_factories", None) is not None
    return [
        (
            bool(getattr(trainer, "use_transformers_continuous_batching", False)),
            "use_transformers_continuous_batching generates over paged batches, whose routes cannot be recorded; leave "
            "it off, sample with vLLM or a rollout_func, or take replay='R2'",
        ),
        (
            tools,
            "tools and environments sample a sequence in several turns, whose routes TRL does not keep apart; return "
            "them from a rollout_func, or take replay='R2'",
        ),
    ]


def _in_r2(trainer: Any) -> list[tuple[bool, str]]:
    args = trainer.args
    every = args.steps_per_generation * trainer.num_iterations
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    aligned = args.gradient_accumulation_steps % every == 0 and not corrects
    return [
        (
            aligned,
            "replay='R2' replays what the old-log-prob pass routed, and with these settings TRL runs none: "
            f"gradient_accumulation_steps ({args.gradient_accumulation_steps}) is a multiple of steps_per_generation x "
            f"num_iterations ({every}), so that each generation is used for one update. There is nothing to replay; "
            "take replay='R3', or raise num_iterations",
        )
    ]
