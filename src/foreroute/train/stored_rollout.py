"""Rollouts as tensors, for checkpoints that are taken while some are waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.capture import Generation
from foreroute.trace import RoutingSpec, RoutingTrace
from foreroute.trace.check import check_rows
from foreroute.train.rollout import Experience, Sampled

OF_TRACE = ("expert_ids_NLK", "valid_N", "token_ids_N", "weight_versions_N", "offsets", "gate_weights_NLK")
OF_GENERATION = ("prompt_lengths", "logprobs_R")
OF_EXPERIENCE = ("rewards_S", "advantages_S", "informative_S")


def stored(experience: Experience) -> dict[str, Any]:
    """Tensors and plain values."""
    generation, sampled = experience.generation, experience.sampled
    trace = generation.trace
    return {
        "trace": _tensors(trace, OF_TRACE)
        | {"provenance": dict(trace.provenance), "pick_order_kept": trace.pick_order_kept},
        "generation": _tensors(generation, OF_GENERATION),
        "experience": _tensors(experience, OF_EXPERIENCE) | {"max_response_tokens": experience.max_response_tokens},
        "sampled": _tensors(sampled, ("first_rewards_S",)) | {"rounds": sampled.rounds, "responses": sampled.responses},
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


def _tensors(holder: Any, names: tuple[str, ...]) -> dict[str, Tensor]:
    arrays: dict[str, NDArray[Any] | None] = {name: getattr(holder, name) for name in names}
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items() if array is not None}


def _arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in values.items()}
