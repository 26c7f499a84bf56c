"""Stage 2, recompute: log-probs of the rollout under the policy that starts the step, before it is updated."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.hf import RoutedModel
from foreroute.capture import Generation
from foreroute.layout import by_token_budget
from foreroute.trace import RoutingTrace, concatenate
from foreroute.train.forward import response_logprobs


@dataclass(frozen=True, eq=False)
class Recomputed:
    """One pass of the trainer over a rollout, without gradients.

    Attributes:
        logprobs_R: float32 [R], of the response tokens, sequence after sequence.
        entropy_R: float32 [R], in nats.
        executed: the routes that this pass took.
        margins_NL: float32 [N, L], top-k margins of its routers.
    """

    logprobs_R: NDArray[np.float32]
    entropy_R: NDArray[np.float32]
    executed: RoutingTrace
    margins_NL: NDArray[np.float32]


def recompute(
    routed: RoutedModel,
    generation: Generation,
    *,
    micro_step_tokens: int,
    temperature: float,
    replay: bool,
    weight_version: int,
) -> Recomputed:
    """Run the policy over the rollout, on its own routes or on the rollout's.

    Args:
        routed: the policy.
        generation: S sequences.
        micro_step_tokens: token slots of one forward.
        temperature: of the rollout.
        replay: force the routes of `generation.trace`, which must carry `weight_version`.
        weight_version: the version of the policy's weights.
    """
    logprobs, entropies, executed, margins = [], [], [], []
    for sequences in by_token_budget(generation.trace.lengths, micro_step_tokens, padded=True):
        part = generation.select(sequences)
        forced: AbstractContextManager[Any] = (
            routed.replay(part.trace, weight_version=weight_version) if replay else nullcontext()
        )
        with torch.no_grad(), forced, routed.record(weight_version=weight_version, margins=True) as recording:
            logprobs_R, entropy_R = response_logprobs(routed.model, part, temperature)
        logprobs.append(logprobs_R.numpy())
        entropies.append(entropy_R.numpy())
        executed.append(recording.trace())
        margins.append(recording.margins_NL())
    return Recomputed(
        np.concatenate(logprobs), np.concatenate(entropies), concatenate(executed), np.concatenate(margins)
    )
