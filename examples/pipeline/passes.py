"""Micro-batches of a rollout, and passes over them through Megatron's schedules, on the engine's routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from examples.pipeline.policy import WIDTH, Policy
from foreroute import layout
from foreroute.capture import Generation


def micro_batches(generation: Generation, policy: Policy, size: int) -> list[dict[str, Any]]:
    """This data-parallel rank's share of a rollout, `size` sequences each.

    A batch has `tokens` and `next` [B, T], the tokens that are inputs, padded on the right, and those behind them;
    `sampled` [B, T], whether the next one was sampled; `trace`, with the routes of all inputs; `routes`, what this rank
    replays of them; `of_rollout`, which of the rollout's R sampled tokens these are.

    The last token of a sequence is no input, so that every row has a route and the plan knows every row.
    """
    ranks, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    share = len(generation) // ranks
    ends = np.concatenate([[0], np.cumsum(generation.response_lengths)])
    batches = []
    for first in range(rank * share, (rank + 1) * share, size):
        whole = generation.trace.select(range(first, first + size))
        trace = whole.truncated(whole.lengths - 1)
        tokens, after = torch.zeros(2, size, WIDTH - 1, dtype=torch.int64)
        sampled = torch.zeros(size, WIDTH - 1, dtype=torch.bool)
        for row, length in enumerate(trace.lengths):
            tokens[row, :length] = torch.from_numpy(trace.tokens(row))
            after[row, :length] = torch.from_numpy(whole.tokens(row)[1:])
            sampled[row, generation.prompt_lengths[first + row] - 1 : length] = True
        placed = layout.pad(trace.lengths, side="right", order="sbhd", to=WIDTH - 1)
        batches.append(
            {
                "tokens": tokens,
                "next": after,
                "sampled": sampled,
                "trace": trace,
                "routes": policy.routed.shard(trace, placed),
                "of_rollout": slice(int(ends[first]), int(ends[first + size])),
            }
        )
    return batches


def replayed_logprobs(policy: Policy, batches: list[dict[str, Any]], generation: Generation) -> NDArray[np.float64]:
    """The trainer's log-probabilities of all sampled tokens on the engine's routes, [R] on every rank."""
    logprobs_R = torch.zeros(len(generation.logprobs_R), dtype=torch.float64)
    reported = run(policy.model, batches, policy.routed.replaying(forward_step), forward_only=True)
    if not mpu.get_tensor_model_parallel_rank():  # tensor ranks report alike
        for batch, logprobs in zip(batches, reported, strict=False):  # on the last stage
            logprobs_R[batch["of_rollout"]] = logprobs.double()
    dist.all_reduce(logprobs_R)
    return logprobs_R.numpy()


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Any]:
    """What Megatron's schedules call for each micro-batch. It knows nothing of replay."""
    batch = next(batches)
    tokens = batch["tokens"]
    positions = torch.arange(WIDTH - 1).expand_as(tokens)
    ahead = torch.ones(WIDTH - 1, WIDTH - 1, dtype=torch.bool).triu(1)[None, None]

    def loss(logits: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_BT = logits.log_softmax(-1).gather(-1, batch["next"][..., None])[..., 0]
        logprobs = logprobs_BT[batch["sampled"]]
        if "advantages" not in batch:
            return logprobs.sum(), logprobs.detach()
        ratio, advantages = (logprobs - batch["old"]).exp(), batch["advantages"]
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        total = -(gain * batch["weights"]).sum()
        return total, total.detach().clone()  # Megatron divides the total by the number of micro-batches, in place

    return model(tokens, positions, ahead), loss


def run(model: Any, batches: list[dict[str, Any]], forward: Any, *, forward_only: bool = False) -> list[Tensor]:
    """All micro-batches through Megatron's schedule; what the loss reported of each, on the last stage."""
    reported: list[Tensor] = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=WIDTH - 1,
        micro_batch_size=len(batches[0]["tokens"]),
        forward_only=forward_only,
    )
    return reported
