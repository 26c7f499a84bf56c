"""Options of a plan, each of which switches one part of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from foreroute.checks import check_number, whole_number
from foreroute.errors import ConfigError, shown
from foreroute.files.toml import unknown_key

PackingRule = Literal["length", "routes"]
"""Rule by which sequences are dealt to micro-steps."""
SlotSharing = Literal["layer", "shared"]
"""A set of redundant slots for each layer, or one set for all."""
PassName = Literal["recompute", "update"]
"""The pass of a plan without gradients, for log-probs, and the one with them; no recomputation of activations."""
PASS_NAMES: tuple[PassName, ...] = get_args(PassName)
PRICED = ("traffic", "pay_off")
"""The options that a cost model prices."""
LARGEST_OPTION = 2**63 - 1
"""The largest number of moves and of threads: far more than there are experts or processors."""


@dataclass(frozen=True)
class PlanOptions:
    """The switches of the planner: arguments, keys of `[parallel.plan]`, and of `foreroute plan --set key=value`.

    Attributes:
        tolerance: a cell is balanced when its slowest rank has at most (1 + tolerance) times the mean. 0 is exact mode,
            0.02 the economical one. `traffic` goes beyond it where the cell is faster so.
        home_moves: most experts of a layer that may change their home at the start of the step; 0 keeps the homes, None
            sets no limit; "all" in a file, which has no None.
        replicas: False serves every expert at its home alone.
        slots: "layer": each layer has its own redundant slots, which keep what they hold from micro-step to
            micro-step. "shared": one set of slots serves all layers and is empty at every cell.
        locality: False splits tokens without regard to where they come from.
        traffic: between nodes, also replicate what cuts the slowest link's bytes, where the cost model says that it
            pays: over all micro-steps of a layer, or where slots are shared, cell by cell. None: on in layers where it
            saves more time than planning it exposes.
        pay_off: drop replicas whose transfer exposes more time than they save, by the cost model. None: on in layers
            where it saves more time than planning it exposes. Where there is a cost model and this is not False, passes
            that the plan saves too little in are executed at homes (`StepPlan.gains`).
        threads: of the planner. Plans do not depend on it.
        packing: what sequences are packed by. "length": their tokens. "routes": they are exchanged then, so that
            experts at their homes are level. `foreroute plan` and trainers go by it; counts for `plan` are packed.
    """

    tolerance: float = 0.02
    home_moves: int | None = 0
    replicas: bool = True
    slots: SlotSharing = "layer"
    locality: bool = True
    traffic: bool | None = None
    pay_off: bool | None = None
    threads: int = 1
    packing: PackingRule = "length"

    def __post_init__(self) -> None:
        check_number(self.tolerance, name="tolerance", below=1, error=ConfigError)
        for name in ("replicas", "locality", *PRICED):
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name not in PRICED):
                raise ConfigError(f"{name} is {shown(value)}; expected true or false")
        for name, least in (("home_moves", 0), ("threads", 1)):
            if name != "home_moves" or self.home_moves is not None:
                whole_number(getattr(self, name), name=name, least=least, most=LARGEST_OPTION, error=ConfigError)
        for name, known in (("slots", SlotSharing), ("packing", PackingRule)):
            if getattr(self, name) not in get_args(known):
                expected = " or ".join(map(repr, get_args(known)))
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; expected {expected}")
        if self.traffic and not self.replicas:
            raise ConfigError("traffic is on with replicas=False; it is by replicas that it is cut")

    @classmethod
    def from_table(cls, values: object) -> PlanOptions:
        """Make options of a table, keys and values as TOML has them. What are options already stays as it is.

        Raises:
            ConfigError: for an unknown key, naming the nearest known one, and for a value that an option cannot have.
        """
        if isinstance(values, PlanOptions):
            return values
        if not isinstance(values, Mapping):
            raise ConfigError(f"options of plans are {shown(values)}; expected a table of the planner's options")
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise ConfigError(unknown_key(str(key), str(key), known))
        given: dict[str, Any] = dict(values)
        if given.get("home_moves") == "all":
            given["home_moves"] = None
        return cls(**given)
