"""The result of reading an agent's record: sequences to train on, and what was left out.

    record ── every path of calls is one conversation ──▶ sequence: tokens, routes, which tokens were sampled for it
           └─ a call that two paths share was sampled once: it is trained on the first of them

The tokens of every path are as the engine saw them. Rows that the record does not have are absent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.decode import decode
from foreroute.capture.generation import Generation
from foreroute.checks import MOST_INT32, whole_number
from foreroute.errors import CaptureError, TraceError, shown
from foreroute.trace import NO_VERSION, RoutingSpec, RoutingTrace

number_of = partial(whole_number, least=0, error=CaptureError)
WeightVersion = int | Callable[[Mapping[str, Any]], int]
"""The weights of a rollout: one version, or a function of a call as the record has it."""


@dataclass(frozen=True, eq=False)
class AgentRollout:
    """Sequences to train on from one record of an agent's calls.

    Attributes:
        generation: S sequences; None where nothing can be trained on.
        ends: of each sequence, what it ends in: the id of a node of skycap, or of a call of NeMo Gym.
        left_out: one sentence for each part of the record that is not in the generation, or is there without routes.
    """

    generation: Generation | None
    ends: tuple[str, ...]
    left_out: tuple[str, ...]


Path = tuple[str, Generation]
"""One conversation: what it ends in, and its tokens, of which those are sampled that are trained on here."""


def path_of(
    end: str, trace: RoutingTrace, sampled_T: NDArray[np.bool_], logprobs: Sequence[NDArray[np.float64]]
) -> Path:
    """Return a conversation; `logprobs` are those of its sampled tokens, in pieces."""
    joined_R = np.concatenate([*logprobs, np.zeros(0)])
    with naming(f"the sequence that ends in {end:.40}"), np.errstate(over="ignore"):
        # what float32 cannot hold is no log-prob, and refused as such
        logprobs_R = joined_R.astype(np.float32)
        return end, Generation(trace, np.array([int(sampled_T.argmax())]), logprobs_R, sampled_T)


def rollout_of(paths: Sequence[Path], left_out: Sequence[str]) -> AgentRollout:
    """Join the conversations of a record."""
    ends, generations = [end for end, _ in paths], [generation for _, generation in paths]
    joined = Generation.concatenate(generations) if paths else None
    return AgentRollout(joined, tuple(ends), tuple(left_out))


def trace_of(spec: RoutingSpec, tokens_T: NDArray[np.int32], rows: Any, valid: NDArray[np.bool_]) -> RoutingTrace:
    """Return one sequence as `decode` checks it, without weight versions; absent rows where nothing was routed.

    Rows are integers [T or T - 1, layers, K], and `valid` is a bool for each.
    """
    if not valid.any():
        return RoutingTrace.unrouted(spec, [tokens_T])
    return decode(rows, model=spec, token_ids=tokens_T, valid=valid)


def version_of(call: Mapping[str, Any], weight_version: WeightVersion) -> int:
    """Return the weights that made a call, as the caller states them."""
    stated: object = weight_version(call) if callable(weight_version) else weight_version
    return number_of(stated, name="the weight version", least=NO_VERSION, most=MOST_INT32)


@contextmanager
def naming(what: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file of a record, or a part of it, in what is refused."""
    try:
        yield
    except TraceError as error:
        raise CaptureError(f"{what}: {error}") from error


def entries_of(record: Mapping[str, Any], name: str, *types: type) -> list[Any]:
    """Return a list of a JSON object, whose entries are of these types and of none derived from them."""
    values = record.get(name)
    if not isinstance(values, list) or not set(map(type, values)) <= set(types):
        raise CaptureError(f"{name} is {shown(values)}; expected a list of {' or '.join(t.__name__ for t in types)}")
    return values
