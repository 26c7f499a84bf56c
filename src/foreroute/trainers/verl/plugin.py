"""verl's plugin: says what is in the way of a script before Ray starts its workers.

verl imports the entry points of the group `verl.plugins` where it is imported itself, in the driver first. There it
validates a configuration as soon as it has composed it, and foreroute looks at the same configuration behind it.
"""

from __future__ import annotations

import warnings
from functools import wraps
from typing import Any

from verl.utils import config as verl_config

from foreroute.trainers.checks import Refusals, refuse
from foreroute.trainers.verl.settings import KEY, fsdp_refusals, megatron_refusals, replay_of

LIBRARY = "actor_rollout_ref.model.external_lib"
OURS = "foreroute.trainers.verl."
FSDP = ("fsdp", "fsdp2")


def require_script(config: Any) -> None:
    """Look at a composed configuration of verl, of which no worker is started.

    Args:
        config: the `DictConfig` of `verl.trainer.main_ppo`.

    Raises:
        ConfigError: naming all settings that foreroute's replay does not go with, and lines that are missing.
    """
    ours, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    actor = verl_config.omega_conf_to_dataclass(ours.actor)
    engine, mode = actor.engine, replay_of(actor.engine)
    libraries = ours.model.external_lib or ()
    libraries = [libraries] if isinstance(libraries, str) else list(libraries)
    if mode == "disabled" or not (actor.strategy in FSDP or any(each.startswith(OURS) for each in libraries)):
        return
    # as verl's worker copies it
    object.__setattr__(engine, "use_remove_padding", ours.model.use_remove_padding)
    if actor.strategy in FSDP:
        library, refusals = f"{OURS}fsdp", fsdp_refusals(engine, ours.model)
    elif actor.strategy == "megatron":
        plans = getattr(engine, "asks_for_plans", False)
        library, refusals = f"{OURS}megatron", megatron_refusals(engine, ours.model, plans=plans)
    else:
        library, refusals = "", [(True, f"the strategy {actor.strategy} has no replay of foreroute's")]
    refuse(f"{KEY} is {mode}, and", [*_missing_lines(library, libraries, rollout, mode), *refusals])
    if mode == "R3" and not rollout.calculate_log_probs:
        warnings.warn(
            "no k3 is measured, so that weights which did not arrive in the rollout engine end no run: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            stacklevel=2,
        )


def _missing_lines(library: str, libraries: list[str], rollout: Any, mode: str) -> Refusals:
    routes, key = rollout.enable_rollout_routing_replay, "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    return [
        (library not in libraries, f"{LIBRARY} is {libraries}, without the engine that replays; name {library} in it"),
        (mode == "R3" and not routes, f"{key} is off, so that the rollout returns no routes; set it to True"),
        (mode == "R2" and routes, f"{key} is on, and R2 takes no routes of a rollout; leave it out, or take R3"),
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
