"""Stage 2, recompute: log-probs of the rollout under the policy that starts the step, before it is updated.

The forward pass over the sequences of one micro-step is here too; stage 3 and the reference run the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from foreroute.adapters.hf import RoutedTransformer
from foreroute.capture import Generation
from foreroute.replay import to_device
from foreroute.trace import RoutingTrace, concatenate
from foreroute.train.device import device_of
from foreroute.train.execution import PolicyExecution
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
    routed: RoutedTransformer,
    execution: PolicyExecution,
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


def response_logprobs(model: Any, generation: Generation, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each sampled token, and the entropy of the distribution it was sampled from.

    Args:
        model: a causal language model.
        generation: the sequences of one micro-batch; their `inputs` are padded on the right.
        temperature: of the rollout.

    Returns:
        Two tensors [R] in float32, or in the logits' dtype where that is wider: response tokens packed sequence after
        sequence. Entropy is in nats, without gradient.
    """
    logits_RV, targets_R = _response_logits(model, generation, temperature)
    logprobs_RV = logits_RV.log_softmax(-1)
    entropy_R = -(logprobs_RV.detach().exp() * logprobs_RV.detach()).sum(-1)
    return logprobs_RV.gather(-1, targets_R[:, None])[:, 0], entropy_R


def sampled_logprobs(model: Any, generation: Generation, temperature: float) -> Tensor:
    """Compute the log-probabilities of `response_logprobs`, to the bit, without the passes over logits for entropy."""
    return -cross_entropy(*_response_logits(model, generation, temperature), reduction="none")


def _response_logits(model: Any, generation: Generation, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute logits [R, V] over the temperature, and find the tokens [R] that were sampled there."""
    input_ids_BT, mask_BT = pad(inputs(generation.trace))
    # the logits at position p are those of token p + 1
    predicts_BT = mask_BT.astype(bool)
    predicts_BT[predicts_BT] = generation.targets_N
    device = device_of(model)
    picked_R = to_device(np.flatnonzero(predicts_BT), device)
    with _head_on(model, picked_R):
        logits = model(
            input_ids=to_device(input_ids_BT, device), attention_mask=to_device(mask_BT, device), use_cache=False
        ).logits
    # a family whose head is a function and no module has computed all of them
    logits_RV = logits if logits.ndim == 2 else _picked(logits, picked_R)
    logits_RV = logits_RV.to(torch.promote_types(logits.dtype, torch.float32))
    responses = [generation.response(s) for s in range(len(generation))]
    targets_R = to_device(np.concatenate(responses).astype(np.int64), device)
    return logits_RV if temperature == 1 else logits_RV / temperature, targets_R


@contextmanager
def _head_on(model: Any, picked_R: Tensor) -> Iterator[None]:
    """While the context is open, the output head sees the picked positions alone, as rows [R, hidden]."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return

    def pick(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_picked(args[0], picked_R), *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def _picked(values_BTX: Tensor, picked_R: Tensor) -> Tensor:
    """Select [R, X] by positions: how many rows a mask picks would be known on the device alone."""
    return values_BTX.flatten(0, 1).index_select(0, picked_R)


def inputs(trace: RoutingTrace) -> RoutingTrace:
    """Give what is put into the model: all but the last token of each sequence, whose logits nobody asks for.

    The engine never routed that token either, so every row that is left can be replayed, and counted ahead.
    """
    return trace.truncated(trace.lengths - 1)


def pad(trace: RoutingTrace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pad tokens and mask, int64 [B, T], on the right, where the mask hides whatever token there is."""
    mask_BT = np.arange(int(trace.lengths.max())) < trace.lengths[:, None]
    input_ids_BT = np.zeros(mask_BT.shape, np.int64)
    input_ids_BT[mask_BT] = trace.token_ids_N
    return input_ids_BT, mask_BT.astype(np.int64)
