"""Rollouts as tensors, for checkpoints that are taken while some are waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreroute.capture import Generation
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.trace.checks import check_rows
from foreroute.train.rollout import Experience, Sampled


def stored(experience: Experience) -> dict[str, Any]:
    """Tensors and plain values, which a checkpoint can hold."""
    generation = experience.generation
    return {
        "trace": _values(generation.trace, "spec"),
        "generation": _values(generation, "trace"),
        "experience": _values(experience, "generation", "sampled"),
        "sampled": _values(experience.sampled),
    }


def restored(state: Mapping[str, Any], spec: RoutingSpec) -> Experience:
    """What was stored.

    Raises:
        KeyError, TypeError: when it is something else.
        TraceContentError: when routes are not those of a model with this spec.
    """
    trace = RoutingTrace(spec, **_arrays(state["trace"]))
    check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, spec)
    generation = Generation(trace, **_arrays(state["generation"]))
    return Experience(generation, sampled=Sampled(**_arrays(state["sampled"])), **_arrays(state["experience"]))


def _values(holder: Any, *without: str) -> dict[str, Any]:
    """All fields of a dataclass but those that are stored on their own."""
    return {each.name: _plain(getattr(holder, each.name)) for each in fields(holder) if each.name not in without}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    return dict(value) if isinstance(value, Mapping) else value


def _arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in values.items()}
