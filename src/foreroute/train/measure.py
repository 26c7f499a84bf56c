"""What a step is recorded as: reward, mismatch without and with replay on the same rollout and weights, load."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from foreroute.capture import Generation
from foreroute.mismatch import (
    RoutingMismatch,
    TokenMismatch,
    margin_histogram,
    routing_mismatch,
    token_mismatch,
)
from foreroute.plan import contiguous_imbalance
from foreroute.records import DeviceRecord, MismatchRecord, NumRanks, SamplingRecord, Side, StepRecord
from foreroute.trace import concatenate, count_assignments
from foreroute.train.passes import Recomputed
from foreroute.train.rollout import Experience, SamplingRounds
from foreroute.train.update import Updated


@dataclass(frozen=True, eq=False)
class StepPart:
    """What one rank saw of a step, or all of them.

    Attributes:
        experience: the rollout.
        passes: forwards of the trainer on it at the same weights: "native" on its own routes, "replayed" on the
            rollout's; one of them may be missing.
        updated: what the update did. Loss, norm and share are those of all ranks.
    """

    experience: Experience
    passes: dict[Side, Recomputed]
    updated: Updated


def merged(parts: list[StepPart]) -> StepPart:
    """Join the step of all ranks, one rank's sequences after another's."""
    if len(parts) == 1:
        return parts[0]
    experiences = [part.experience for part in parts]
    passes = {
        name: Recomputed(
            np.concatenate([part.passes[name].logprobs_R for part in parts]),
            np.concatenate([part.passes[name].entropy_R for part in parts]),
            concatenate([part.passes[name].executed for part in parts]),
            np.concatenate([part.passes[name].margins_NL for part in parts]),
        )
        for name in parts[0].passes
    }
    experience = Experience(
        Generation.concatenate([each.generation for each in experiences]),
        np.concatenate([each.rewards_S for each in experiences]),
        np.concatenate([each.advantages_S for each in experiences]),
        np.concatenate([each.informative_S for each in experiences]),
        experiences[0].max_response_tokens,
        SamplingRounds(
            np.concatenate([each.sampled.first_rewards_S for each in experiences]),
            max(each.sampled.rounds for each in experiences),
            sum(each.sampled.responses for each in experiences),
            tuple(failure for each in experiences for failure in each.sampled.failures),
        ),
    )
    micro_step_S = np.concatenate([part.updated.micro_step_S for part in parts])
    return StepPart(experience, passes, replace(parts[0].updated, micro_step_S=micro_step_S))


def step_record(step: int, whole: StepPart, trained_with: Side, seconds: dict[str, float]) -> StepRecord:
    """Make one line of metrics.jsonl, of what all ranks saw; `seconds` are by stage."""
    experience, passes, updated = whole.experience, whole.passes, whole.updated
    generation, rewards_S = experience.generation, experience.sampled.first_rewards_S
    rewards_S = rewards_S[~np.isnan(rewards_S)]
    failures = experience.sampled.failures
    return StepRecord(
        step=step,
        weight_version=max(generation.trace.versions),
        staleness=step - min(generation.trace.versions),
        seconds={phase: round(value, 4) for phase, value in seconds.items()},
        reward_mean=float(rewards_S.mean()),
        reward_std=float(rewards_S.std()),
        exact_share=float((rewards_S == 1).mean()),
        reward_failures=len(failures),
        reward_failure=failures[0] if failures else None,
        response_tokens_mean=float(generation.response_lengths.mean()),
        entropy=float(passes[trained_with].entropy_R.mean()),
        grad_norm=updated.grad_norm,
        clip_share=updated.clip_share,
        loss=updated.loss,
        kl=updated.kl,
        tokens=generation.trace.num_rows,
        trained_with=trained_with,
        mismatch={name: mismatch_record(*mismatch_of(generation, result)) for name, result in passes.items()},
        margins_LB=margin_histogram(passes["native"].margins_NL).tolist() if "native" in passes else None,
        live_agreement=list(updated.live_agreement) or None,
        expert_load=_expert_load(generation, updated),
        importance=updated.importance,
        sampling=SamplingRecord(
            rounds=experience.sampled.rounds,
            responses=experience.sampled.responses,
            informative_share=float(experience.informative_S.mean()),
        ),
    )


def mismatch_of(generation: Generation, result: Recomputed) -> tuple[TokenMismatch, RoutingMismatch]:
    """Compare trainer and engine: log-probs of response tokens, routes of all tokens that both routed."""
    return (
        token_mismatch(result.logprobs_R, generation.logprobs_R),
        routing_mismatch(generation.trace, result.executed),
    )


def mismatch_record(tokens: TokenMismatch, routes: RoutingMismatch) -> MismatchRecord:
    """Give the measures of `foreroute.mismatch` as plain data."""
    return MismatchRecord(
        response_tokens=tokens.count,
        k3=tokens.k3,
        f2=tokens.f(2.0),
        f1_5=tokens.f(1.5),
        max_abs_log_ratio=tokens.max_abs_log,
        routed_rows=routes.rows,
        differing_share=routes.differing_share,
        differing_tokens_share=routes.differing_tokens_share,
        differing_share_by_layer=routes.differing_share_L.tolist(),
    )


def reset_memory_peak(device: torch.device) -> None:
    """Count anew what `memory_peak` gives."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_peak(device: torch.device) -> int:
    """Give the most bytes that tensors took at a time on the device; 0 on the CPU, where torch counts none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def device_record(device: torch.device, most_bytes: int) -> DeviceRecord:
    """Make the record "device" of a step; `most_bytes` is `memory_peak` of the rank that had the highest."""
    if device.type != "cuda":
        return DeviceRecord(kind=device.type, name=platform.machine())
    return DeviceRecord(kind=device.type, name=torch.cuda.get_device_name(device), peak_memory_bytes=most_bytes)


def _expert_load(generation: Generation, updated: Updated) -> dict[NumRanks, float]:
    """Give the imbalance over groups of several sizes, whatever the run is executed on."""
    trained = np.flatnonzero(updated.micro_step_S >= 0)
    if not len(trained):
        return {}
    counts = count_assignments(generation.trace.select(trained), updated.micro_step_S[trained])
    sizes = [ranks for ranks in get_args(NumRanks) if counts.shape[-1] % int(ranks) == 0]
    return {ranks: contiguous_imbalance(counts, int(ranks)) for ranks in sizes}
