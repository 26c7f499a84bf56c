"""Stage 2, recompute: log-probs of the rollout under the policy that starts the step, before it is updated."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.hf import RoutedModel
from foreroute.capture import Generation
from foreroute.trace import RoutingTrace, concatenate
from foreroute.train.execution import Execution
from foreroute.train.forward import inputs, response_logprobs
from foreroute.train.schedule import Stage


@dataclass(frozen=True, eq=False)
class Recomputed:
    """One pass of the trainer over a rollout, without gradients.

    Attributes:
        logprobs_R: float32 [R], of the response tokens, sequence after sequence.
        entropy_R: float32 [R], in nats.
        executed: the routes that this pass took; last tokens have none.
        margins_NL: float32 [N - S, L], top-k margins of its routers; last tokens are not put into the model.
    """

    logprobs_R: NDArray[np.float32]
    entropy_R: NDArray[np.float32]
    executed: RoutingTrace
    margins_NL: NDArray[np.float32]


def recompute(
    routed: RoutedModel,
    execution: Execution,
    generation: Generation,
    stage: Stage,
    *,
    temperature: float,
    replay: bool,
    weight_version: int,
    accepted: Collection[int] | None = None,
    gate_weights: bool = False,
) -> Recomputed:
    """Run the policy over the rollout, on its own routes or on the rollout's.

    Args:
        routed: the policy.
        execution: how it is executed.
        generation: S sequences.
        stage: the sequences of each forward, all of them.
        temperature: of the rollout.
        replay: force the routes of `generation.trace`.
        weight_version: the version of the policy's weights.
        accepted: the versions that replayed routes may be of; that of the policy alone by default.
        gate_weights: force the rollout's gate weights too.
    """
    logprobs, entropies, executed, margins = [], [], [], []
    versions = weight_version if accepted is None else accepted
    with torch.no_grad(), execution.running(stage) if replay else nullcontext():
        for number, sequences in enumerate(stage.micro_steps):
            part = generation.select(sequences)
            routes = inputs(part.trace)
            forced: AbstractContextManager[Any] = (
                routed.replay(routes, weight_version=versions, gate_weights=gate_weights) if replay else nullcontext()
            )
            recorded = routed.record(weight_version=weight_version, margins=True)
            with forced, execution.micro_step(number, routes), recorded as recording:
                logprobs_R, entropy_R = response_logprobs(routed.model, part, temperature)
            logprobs.append(logprobs_R.cpu().numpy())
            entropies.append(entropy_R.cpu().numpy())
            executed.append(recording.rollout([part.trace.tokens(s) for s in range(len(part))]))
            margins.append(recording.margins_NL())
    responses_S, routed_S = generation.response_lengths, generation.trace.lengths - 1
    return Recomputed(
        stage.in_order(logprobs, responses_S),
        stage.in_order(entropies, responses_S),
        concatenate(executed).select(stage.restore_S),
        stage.in_order(margins, routed_S),
    )
