"""verl's plugin: says what is in the way of a script before Ray starts its workers.

verl imports the entry points of the group `verl.plugins` where it is imported itself, in the driver first. There it
validates a configuration as soon as it has composed it, and foreroute looks at the same configuration behind it.
"""

from __future__ import annotations

import warnings
from functools import wraps
from importlib.util import find_spec
from typing import Any

from verl.utils import config as verl_config

from foreroute.trainers.checks import Refusals, refuse
from foreroute.trainers.verl.settings import (
    KEY,
    MASKS,
    OWN_REPLAY,
    fsdp_refusals,
    grouping_refusals,
    libraries_of,
    megatron_refusals,
    replay_of,
)

LIBRARY = "actor_rollout_ref.model.external_lib"
ENGINES = "foreroute.trainers.verl."
FSDP = ("fsdp", "fsdp2")


def require_script(config: Any) -> None:
    """Raise `ConfigError` naming all settings of a script of verl that are in the way, and lines that are missing."""
    roles, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    actor = verl_config.omega_conf_to_dataclass(roles.actor)
    engine, mode = actor.engine, replay_of(actor.engine)
    libraries = libraries_of(roles.model)
    is_named = any(each.startswith(ENGINES) for each in libraries)
    if mode == "disabled" or (_has_own_replay(actor.strategy) and not is_named):
        return
    in_the_way: Refusals
    masked, can_mask = MASKS in libraries, rollout.get("name") == "vllm"
    if actor.strategy in FSDP:
        in_the_way = [*_missing_lines(f"{ENGINES}fsdp", libraries, rollout, mode), *fsdp_refusals(engine, roles.model)]
    elif actor.strategy == "megatron":
        lines = _missing_lines(f"{ENGINES}megatron", libraries, rollout, mode)
        in_the_way = [*lines, *megatron_refusals(engine, roles.model)]
        if getattr(engine, "packing", "length") == "routes":
            in_the_way += [(wrong, f"packing is routes, and {text}") for wrong, text in grouping_refusals(actor)]
    else:
        in_the_way = [(True, f"the strategy {actor.strategy} has no replay; take fsdp, fsdp2 or megatron")]
    if masked:
        in_the_way = [*in_the_way, *_mask_refusals(roles, can_mask=can_mask)]
    refuse(f"{KEY} is {mode}, and", in_the_way)
    neutral = {"top_p": (None, 1), "top_k": (None, 0, -1)}
    cuts = [f"{name}={rollout[name]}" for name in neutral if rollout[name] not in neutral[name]]
    if mode == "R3" and cuts and not masked:
        remedy = f"name {MASKS} in {LIBRARY} too, which scores on what was left, or leave them out"
        warnings.warn(
            f"{', '.join(cuts)} leave tokens out of the rollout, and verl's trainer scores over all tokens, so that "
            "log-probs of both sides differ on the same experts, and k3 shows it; "
            f"{remedy if can_mask else 'leave them out'}",
            stacklevel=2,
        )
    if mode == "R3" and not rollout.calculate_log_probs:
        warnings.warn(
            "no k3 is measured, so that weights which did not arrive in the rollout engine end no run: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            stacklevel=2,
        )


def _has_own_replay(strategy: str) -> bool:
    # the second where verl has the patch of `examples/verl/upstream`
    return strategy in OWN_REPLAY or (
        strategy in FSDP and find_spec("verl.workers.engine.fsdp.router_replay") is not None
    )


def _missing_lines(library: str, libraries: list[str], rollout: Any, mode: str) -> Refusals:
    routes, key = rollout.enable_rollout_routing_replay, "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    return [
        (library not in libraries, f"{LIBRARY} is {libraries}, without the engine that replays; add {library}"),
        (mode == "R3" and not routes, f"{key} is off, so that the rollout returns no routes; set it to True"),
        (mode == "R2" and routes, f"{key} is on, and R2 takes no routes of a rollout; leave it out, or take R3"),
    ]


def _mask_refusals(roles: Any, *, can_mask: bool) -> Refusals:
    """List what sampling masks do not go with, or need beside `external_lib`."""
    rollout, validation = roles.rollout, roles.rollout.val_kwargs
    return [
        (
            not can_mask,
            f"{LIBRARY} names {MASKS}, and masks come from vLLM alone; leave it out",
        ),
        (
            not rollout.engine_kwargs.vllm.get("return_sampling_mask"),
            "vLLM is not asked for masks; set +actor_rollout_ref.rollout.engine_kwargs.vllm.return_sampling_mask=True",
        ),
        (roles.model.use_fused_kernels, "use_fused_kernels scores past sampling masks; leave it off"),
        (
            rollout.top_k < 1 or validation.top_k < 1 or validation.temperature <= 0,
            "with sampling masks vLLM takes no request without a top_k or at temperature 0, which rollout or its "
            "val_kwargs ask for; set rollout.top_k (the size of the vocabulary leaves nothing out), and for greedy "
            "validation val_kwargs.top_k=1 and val_kwargs.temperature=1",
        ),
    ]


def register() -> None:
    """Have verl's own validation of a configuration go on to `require_script`."""
    own = verl_config.validate_config
    if getattr(own, "looks_at_replay", False):
        return

    @wraps(own)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        own(config, *args, **kwargs)
        require_script(config)

    validate_config.looks_at_replay = True  # type: ignore[attr-defined]
    verl_config.validate_config = validate_config


register()
