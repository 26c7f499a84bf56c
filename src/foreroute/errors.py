"""Every error that foreroute raises on purpose.

Whoever catches `ForerouteError` catches all of them. `InputError`, which is a `ValueError` too, is for what was handed
in: the user can mend it, and the command line exits with code 2. The others tell of a model, an engine, a rank or a
run. The base and the errors of replay stand in `foreroute.core`, which can be taken without the rest.
"""

from collections.abc import Iterable
from reprlib import Repr

from foreroute.core.errors import AttachError as AttachError
from foreroute.core.errors import ForerouteError as ForerouteError
from foreroute.core.errors import ReplayError as ReplayError
from foreroute.core.errors import printable as printable

_SHORT = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 40


def shown(value: object) -> str:
    """A short text of any value. One nested deep, very long, or whose `repr` raises, is named by its type."""
    try:
        return _SHORT.repr(value)[:120]
    except Exception:
        return f"of type {type(value).__name__}"


def few(names: Iterable[str]) -> str:
    """Names in order, the first of many, and each cut where it is very long."""
    listed = sorted(names)
    return ", ".join(f"{name:.40}" for name in listed[:16]) + (", ..." if len(listed) > 16 else "")


def how_to_install(extra: str) -> str:
    """Say what installs the libraries of an extra. foreroute is not on PyPI, so it is installed from a clone."""
    return f"pip install '.[{extra}]' in a clone of foreroute brings it"


class InputError(ForerouteError, ValueError):
    """Raised when something that the user handed in is wrong."""


class ConfigError(InputError):
    """Raised when a configuration has an unknown key, a value of the wrong type, or values that conflict."""


class TraceError(InputError):
    """Base of everything that can be wrong with a routing trace."""


class TraceContentError(TraceError):
    """Raised when routes cannot be true: ids out of range, an expert picked twice, lengths that disagree."""


class TraceFileError(TraceError):
    """Raised when a file is not a readable trace, is damaged, or already exists."""


class SpecMismatchError(TraceError):
    """Raised when a trace was recorded from a model with other experts or layers."""


class CaptureError(TraceError):
    """Raised when engine output is of no known form, is damaged, or holds routes that cannot be trusted."""


class BatchMismatchError(TraceError):
    """Raised when a trace does not hold the rows of the batch it should be replayed on."""


class StaleTraceError(TraceError):
    """Raised when a trace was recorded under another weight version than the one expected."""


class LayoutError(InputError):
    """Raised when sequences or layers cannot be laid out as asked: lengths that do not divide, a rank too many."""


class TopologyError(InputError):
    """Raised when ranks do not fill nodes, experts do not divide over ranks, or a bandwidth or budget is impossible."""


class CountsError(InputError):
    """Raised when counts of assignments have a wrong shape, are negative or not whole, or differ from a plan's."""


class PlanError(InputError):
    """Raised when a plan is damaged, breaks its limits, is for other counts or ranks, or cannot be executed."""


class ForecastError(InputError):
    """Raised when a step would take more memory than it may, or when what it takes cannot be forecast."""


class DatasetError(InputError):
    """Raised when a data set cannot be read, or a line of it is not what it must be."""


class RunFolderError(InputError):
    """Raised when a run folder is missing, damaged, or already in use."""


class PlacementError(ForerouteError, RuntimeError):
    """Raised when experts are saved or loaded while they live elsewhere than their framework looks, or cannot move."""


class EngineError(ForerouteError, RuntimeError):
    """Raised when a rollout engine cannot be started, does not answer in time, dies, or answers with nonsense."""


class TransferError(ForerouteError, RuntimeError):
    """Raised when weights or gradients of experts do not get from rank to rank: a peer is gone, late or out of step."""


class RankError(ForerouteError, RuntimeError):
    """Raised on the ranks that were well when another process of the run failed."""


class FunctionError(ForerouteError, RuntimeError):
    """Raised when a function of the user's raises, takes too long, dies, or returns what it must not."""


class DivergedError(ForerouteError, ArithmeticError):
    """Raised when loss, gradients or probabilities stop being finite."""
