"""The table of what is true of sessions of any framework's models: functions that take a kind of `Subject`."""

import re
from inspect import getsource

from tests.replay import sessions_open_and_close, sessions_recomputation, sessions_rows

PROPERTIES = {
    name.removeprefix("check_"): check
    for module in (sessions_open_and_close, sessions_recomputation, sessions_rows)
    for name, check in vars(module).items()
    if name.startswith("check_")
}
OF_ALL = re.compile(r"framework\.(gates|recomputations)(\[1:\])?[^\w\[]")
OVER_VARIANTS = [name for name, check in PROPERTIES.items() if OF_ALL.search(getsource(check))]
"""Those that are asked of all kinds of gate, or of all ways of recomputing."""
SHARE = 5


def at_once(framework, name):
    """The framework with the usual variant and a fifth of the others, which is another for each property."""
    if name not in OVER_VARIANTS:
        return framework
    first, chosen = -OVER_VARIANTS.index(name) % SHARE, {}
    for axis in ("gates", "recomputations"):
        usual, *others = getattr(framework, axis)
        chosen[axis] = [usual, *others[first::SHARE]]
    return type(framework.__name__, (framework,), chosen)


def in_full(framework, name):
    return framework
