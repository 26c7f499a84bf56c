"""Requests of a verl configuration, and those that are refused. A refusal names all that is in the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from foreroute.errors import ConfigError
from foreroute.trainers.checks import Refusals, refuse

Replay = Literal["disabled", "R2", "R3"]
KEY = "router_replay.mode"
OWN_REPLAY = ("megatron", "veomni")
"""Strategies whose engines of verl's own replay."""
MASKS = "foreroute.trainers.verl.sampling_masks"
"""The library, beside that of an engine, by which the engine scores on sampling masks."""
FIXED_MICRO_BATCHES = "use_dynamic_bsz is off, without which verl restores no order of outputs; switch it on"


def replay_of(engine_config: Any) -> Replay:
    """Read `router_replay.mode` in the configuration of an engine. Raises `ConfigError` for what nothing reads."""
    stated = getattr(engine_config, "router_replay", None)
    if stated is not None and not isinstance(stated, Mapping) and not hasattr(stated, "__dict__"):
        raise ConfigError(f"router_replay is {stated!r}; expected a section with the key mode")
    values = stated if isinstance(stated, Mapping) else vars(stated) if stated is not None else {}
    mode: Any = values.get("mode", "disabled")
    if mode not in ("disabled", "R2", "R3"):
        raise ConfigError(f"{KEY} is {mode!r}; expected disabled, R2 or R3")
    files = sorted(name for name in ("record_file", "replay_file") if values.get(name))
    if files:
        raise ConfigError(f"router_replay has {', '.join(files)}, which nothing reads; save traces with foreroute.save")
    replay: Replay = mode
    return replay


def libraries_of(model: Any) -> list[str]:
    """Read the names in `external_lib` of the configuration of a model; none of another one."""
    named = getattr(model, "external_lib", None) or ()
    return [named] if isinstance(named, str) else list(named)


def require_supported_by_megatron(config: Any, model: Any, *, replays: bool, plans: bool) -> None:
    """Raise `ConfigError` naming what of verl's Megatron engine replay, or a plan, does not go with."""
    if plans and not replays and not config.forward_only:
        raise ConfigError(f"a plan is made of routes that are known; set {KEY}=R3, or take McoreEngineConfig")
    if replays:
        refuse(f"{KEY} is set, and", megatron_refusals(config, model))


def fsdp_refusals(config: Any, model: Any) -> Refusals:
    """List what may stand in the way of replay in verl's FSDP engine."""
    return [
        (
            # a key that verl's own tables do not list
            model.lora_rank and getattr(model, "target_parameters", None) and config.strategy == "fsdp",
            "target_parameters puts LoRA on experts, which PEFT does not find under FSDP1; take the strategy fsdp2",
        ),
    ]


def megatron_refusals(config: Any, model: Any) -> Refusals:
    """List what may stand in the way of replay in verl's Megatron engine."""
    return [
        (
            config.dynamic_context_parallel,
            "dynamic_context_parallel is on, under which verl splits no batch; switch it off",
        ),
        (
            (model.lora or {}).get("rank", 0),
            "lora.rank is set, which verl leaves to Megatron-Bridge, under which it was never tested; leave it at 0",
        ),
        (
            getattr(config, "packing", "length") == "routes"
            and not (config.use_remove_padding or config.pad_bshd_to_minibatch_max),
            "packing is routes, and micro-batches are padded to their own longest sequence, which verl's token budget "
            "does not count; set pad_bshd_to_minibatch_max=True, or take the packing length",
        ),
    ]


def grouping_refusals(actor: Any) -> Refusals:
    """List what of verl's actor makes gradients depend on which sequences share a micro-batch."""
    loss = actor.policy_loss
    mode, correction = loss.get("loss_mode", "vanilla"), loss.get("rollout_correction", None) or {}
    of_micro_batch = {
        "clip_cov": "draws the tokens that it leaves out from each micro-batch",
        "kl_cov": "picks tokens by their covariance in each micro-batch",
        "geo_mean": "takes the mean over the sequences of each micro-batch",
    }
    return [
        (not actor.use_dynamic_bsz, FIXED_MICRO_BATCHES),
        (
            mode in of_micro_batch,
            f"policy_loss.loss_mode is {mode}, which {of_micro_batch.get(mode)}; take another, or the packing length",
        ),
        (
            mode == "bypass_mode" and correction.get("rollout_is_batch_normalize", False),
            "rollout_is_batch_normalize is on, which divides weights by the mean of each micro-batch; switch it off",
        ),
        (
            actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None,
            "loss_agg_mode is seq-mean-token-sum-norm without loss_scale_factor, so that the width of a micro-batch "
            "may be the divisor; set loss_scale_factor",
        ),
    ]


def require_regroupable(transformer: Any) -> None:
    """Raise `ConfigError` for losses of Megatron's routers, which are means over micro-batches."""
    types, coefficients = transformer.moe_router_load_balancing_type, transformer.moe_aux_loss_coeff
    pairs = zip(
        types if isinstance(types, list) else [types],
        coefficients if isinstance(coefficients, list) else [coefficients],
        strict=False,
    )
    named = [each for each, coefficient in pairs if "loss" in each and coefficient]
    refuse(
        "packing is routes, and",
        [
            (
                bool(named or transformer.moe_z_loss_coeff),
                f"{' and '.join([*named, *(['moe_z_loss_coeff'] if transformer.moe_z_loss_coeff else [])])} of "
                "override_transformer_config is a mean over each micro-batch; set it to 0, or take the packing length",
            )
        ],
    )
