"""Engine that verl makes: foreroute's instead of its own, and none that would leave a replay or a plan out.

Classes of other engines are left as they are. What they would pass over without a word is refused where verl makes an
engine, in `EngineRegistry.new`.
"""

from __future__ import annotations

from typing import Any

from verl.workers.engine import EngineRegistry

from foreroute.errors import AttachError, ConfigError
from foreroute.trainers.verl.settings import KEY, MASKS, OWN_REPLAY, libraries_of, replay_of

LANGUAGE_MODEL = "language_model"
LIBRARIES = {
    "fsdp": "foreroute.trainers.verl.fsdp",
    "fsdp2": "foreroute.trainers.verl.fsdp",
    "megatron": "foreroute.trainers.verl.megatron",
}
"""By strategy, the one by which verl makes our engine."""


def replace_engine(engine: type, of: type, strategy: str, *, device: str | None = None) -> None:
    """Have verl make our engine in the place of its own, on one device or all. Raises `AttachError` where others do."""
    engines = getattr(EngineRegistry, "_engines", {}).get(LANGUAGE_MODEL, {}).get(strategy, {})
    places = list(engines) if device is None else [device]
    if not places:
        raise AttachError(f"verl registers no engine for the strategy {strategy}; this release is not known")
    for place in places:
        found: Any = engines.get(place)
        if found is of:
            engines[place] = engine
        elif not getattr(found, "replays_routes", False):
            raise AttachError(
                f"verl makes {getattr(found, '__name__', found)} for the strategy {strategy} on {place}; expected its "
                f"own {of.__name__}, or an engine derived from {engine.__module__}.{engine.__name__}"
            )


def refuse_what_engines_pass_over() -> None:
    """Have verl make no engine that would leave out a replay or plans that its configuration asks for."""
    make = EngineRegistry.new
    if getattr(make, "refuses", False):
        return

    def new(model_type: str, backend: str, *args: Any, **kwargs: Any) -> Any:
        engine: Any = EngineRegistry.get_engine_cls(model_type, backend)
        _refuse_ignored_settings([*args, *kwargs.values()], engine, model_type, backend)
        return make(model_type, backend, *args, **kwargs)

    new.refuses = True  # type: ignore[attr-defined]
    EngineRegistry.new = new


def _refuse_ignored_settings(configs: list[Any], engine: Any, model_type: str, backend: str) -> None:
    asks_for_plans = any(getattr(config, "asks_for_plans", False) for config in configs)
    if asks_for_plans and not getattr(engine, "executes_plans", False):
        raise ConfigError(
            f"PlanningMegatronConfig asks for plans, and {engine.__name__}, which verl takes here, makes none. For a "
            "language model on CUDA, name foreroute.trainers.verl.megatron in actor_rollout_ref.model.external_lib; "
            "for any other, leave out the line that names PlanningMegatronConfig"
        )
    if model_type != LANGUAGE_MODEL or getattr(engine, "replays_routes", False):
        return
    remedy = f"add {LIBRARIES[backend]} to external_lib" if backend in LIBRARIES else "take fsdp, fsdp2 or megatron"
    # first, since whoever names masks has begun to name libraries
    if any(MASKS in libraries_of(config) for config in configs):
        raise ConfigError(
            f"external_lib names {MASKS}, and {engine.__name__}, which verl takes for the strategy {backend}, scores "
            f"on no masks; {remedy}"
        )
    if backend not in OWN_REPLAY and any(replay_of(config) != "disabled" for config in configs):
        raise ConfigError(
            f"{KEY} is set, and {engine.__name__}, which verl takes for the strategy {backend}, has no replay; {remedy}"
        )
