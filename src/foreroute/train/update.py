"""Stage 3, update: an optimizer step for each mini-batch, whose gradients are accumulated over micro-steps."""

from __future__ import annotations

import math
from collections.abc import Collection
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf import RoutedTransformer
from foreroute.errors import ConfigError, DivergedError
from foreroute.records import ImportanceRecord
from foreroute.replay import to_device
from foreroute.trace import RoutingTrace
from foreroute.trace.checks import as_offsets, join_ranges
from foreroute.train.config import RLConfig
from foreroute.train.objective import TokenLosses, Tokens, accepted_sequences, coefficients, denominator, token_losses
from foreroute.train.passes import PolicyExecution, Stage, inputs, sampled_logprobs
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Experience

NO_TOKENS = np.array([*np.zeros(7), -np.finfo(np.float64).max])
"""What `_figures` gives of none."""
LOG_OF_FLOAT64 = math.log(np.finfo(np.float64).max)
"""Log of its largest number, which stands for every rho above."""


@dataclass(frozen=True)
class Updated:
    """What an update did.

    Attributes:
        loss: mean over mini-batches.
        grad_norm: mean over mini-batches, before clipping.
        clip_share: share of the trained response tokens whose update the clip bounds changed.
        importance: how far trainer and engine are apart on them, and what correction and rejection did.
        kl: mean divergence from the reference over the trained tokens; None without one.
        micro_step_S: int64 [S], the micro-step of each sequence of this rank; -1 where it was left out.
        live_agreement: for each mini-batch, the share of (token, layer) whose live top-k is the replayed set; empty
            where nothing is replayed, or it was not watched.
    """

    loss: float
    grad_norm: float
    clip_share: float
    importance: ImportanceRecord
    kl: float | None
    micro_step_S: NDArray[np.int64]
    live_agreement: tuple[float, ...] = ()


def update(
    routed: RoutedTransformer,
    execution: PolicyExecution,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    mini_batches: list[Stage],
    old_logprobs_R: NDArray[np.float32],
    routes: RoutingTrace | None,
    config: RLConfig,
    *,
    weight_version: int,
    temperature: float,
    accepted: Collection[int] | None = None,
    reference_logprobs_R: NDArray[np.float32] | None = None,
    watch_routes: bool = False,
) -> Updated:
    """Take an optimizer step for each mini-batch of one rollout.

    A mini-batch of which every sequence was rejected takes none.

    Args:
        routed: the policy.
        execution: how it is executed.
        optimizer: over its parameters.
        experience: the rollout with its advantages.
        mini_batches: the sequences of each forward and backward.
        old_logprobs_R: float32 [R], from recompute.
        routes: of all S sequences, to replay in every forward and recomputation; None for the policy's own.
        config: of the loss.
        weight_version: of the policy before this update.
        temperature: of the rollout.
        accepted: the versions that `routes` may be of; that of the policy alone by default.
        reference_logprobs_R: float32 [R], of the reference policy; needed with a `kl_coefficient`.
        watch_routes: have routers select by themselves too, in the same forwards, for `live_agreement`.

    Raises:
        ConfigError: when a divergence from a reference is asked for, and there is none.
        StaleTraceError: when `routes` are of other versions.
        DivergedError: when loss or gradients are not finite; no optimizer step is taken with them.
    """
    if config.kl_coefficient and reference_logprobs_R is None:
        raise ConfigError(
            f"rl.kl_coefficient = {config.kl_coefficient} needs a reference; give the trainer one, or set it to 0"
        )
    ranks, generation, rule = execution.ranks, experience.generation, config.rejection
    old, engine, lengths_S = map(torch.from_numpy, (old_logprobs_R, generation.logprobs_R, generation.response_lengths))
    bounds = rule.low or 0.0, rule.high or math.inf
    accepted_S = accepted_sequences(old, engine, lengths_S, rule.kind, *bounds).numpy()
    trained_S = experience.informative_S & accepted_S
    figures, losses, norms = [], [], []
    agreement_M2 = np.zeros((len(mini_batches), 2))

    for mini_batch, stage in enumerate(mini_batches):
        sequences = stage.order_S
        mine = denominator(generation.response_lengths[sequences[trained_S[sequences]]], config.mean)
        divisor = int(ranks.sum([mine])[0])
        parts: list[Tensor] = []
        with nullcontext() if routes is None else execution.running(stage, updating=True):
            # gradients add up over micro-steps and ranks, so each part is divided by the divisor of the whole
            for number, sequences in enumerate(stage.micro_steps):
                with ExitStack() as replaying:
                    if routes is not None:
                        taken = inputs(routes.select(sequences))
                        session = replaying.enter_context(
                            routed.replay(
                                taken,
                                weight_version={weight_version} if accepted is None else accepted,
                                gate_weights=config.routing == "R3+weights",
                                telemetry=watch_routes,
                            )
                        )
                        replaying.enter_context(execution.micro_step(number, taken))
                    # sequences that are not trained take part in the forward alone
                    logprobs_R = sampled_logprobs(routed.model, generation.select(sequences), temperature)
                    tokens = _trained_tokens(
                        experience, trained_S, old_logprobs_R, reference_logprobs_R, sequences, logprobs_R
                    )
                    each = token_losses(tokens, config)
                    longest, dtype = experience.max_response_tokens, each.losses_R.dtype
                    loss = (coefficients(tokens.lengths_S, config.mean, longest, dtype) * each.losses_R).sum()
                    (loss / max(divisor, 1)).backward()
                figures.append(_figures(each))
                parts.append(loss.detach().double())
                if routes is not None and watch_routes:
                    live = session.agreement().routing
                    agreement_M2[mini_batch] += live.differing_L.sum(), live.rows * len(live.differing_L)
            # one read of the device for all of them
            losses.append(float(ranks.sum([float(sum(parts))])[0]) / max(divisor, 1))
        norms.append(execution.finish_gradients(config.max_grad_norm))
        if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
            raise DivergedError(
                f"loss {losses[-1]} and gradient norm {norms[-1]} in step {weight_version}; lower rl.learning_rate"
            )
        if divisor:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        execution.weights_changed()

    agreement_M2 = ranks.sum(agreement_M2)
    rejected = int((experience.informative_S & ~accepted_S).sum())
    importance, clip_share, kl = _total(figures, rejected, ranks)
    return Updated(
        float(np.mean(losses or [0.0])),
        float(np.mean(norms or [0.0])),
        clip_share,
        importance,
        None if reference_logprobs_R is None else kl,
        _micro_step_S(mini_batches, len(generation)),
        tuple(float(1 - differing / cells) for differing, cells in agreement_M2 if cells),
    )


def _figures(losses: TokenLosses) -> NDArray[np.float64]:
    """Sum up the trained tokens of a micro-step: their number, clipped, rho, rho^2, w, cut, kl; and the largest log.

    rho is divided by the largest of them, which float64 may not hold.
    """
    if not len(losses.log_ratio_R):
        return NO_TOKENS
    largest = losses.log_ratio_R.max()
    ratio_R = (losses.log_ratio_R - largest).exp()
    kl = ratio_R.new_zeros(()) if losses.kl_R is None else losses.kl_R.detach().double().sum()
    ratios = [ratio_R.sum(), ratio_R.square().sum()]
    parts = [losses.clipped_R.sum(), *ratios, losses.weights_R.double().sum(), losses.cut_R.sum(), kl, largest]
    # one copy, for which the device is waited for once
    return np.array([len(ratio_R), *torch.stack([part.double() for part in parts]).cpu().tolist()])


def _joined(figures_X8: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum up figures [X, 8]; rho is divided by the largest of all."""
    largest = figures_X8[:, -1].max()
    scale_X = np.exp(figures_X8[:, -1] - largest)
    tokens, clipped, ratio_X, square_X, weight, cut, kl, _ = figures_X8.T
    parts = [tokens, clipped, ratio_X * scale_X, square_X * scale_X**2, weight, cut, kl]
    return np.array([*(part.sum() for part in parts), largest])


def _total(figures_M8: list[NDArray[np.float64]], rejected: int, ranks: Ranks) -> tuple[ImportanceRecord, float, float]:
    """Sum up over all micro-steps and ranks; a collective call. `rejected` sequences of this rank were left out.

    Returns:
        The importance, the share of clipped tokens, and the mean divergence from the reference; 0 without tokens.
    """
    each_G8 = ranks.all_gather(_joined(np.stack([NO_TOKENS, *figures_M8])))
    tokens, clipped, ratio, square, weight, cut, kl, log_largest = _joined(each_G8).tolist()
    count, largest = max(tokens, 1.0), math.exp(min(log_largest, LOG_OF_FLOAT64))
    importance = ImportanceRecord(
        ratio_mean=ratio / count * largest,
        ratio_max=largest,
        effective_share=ratio**2 / (count * square) if square else 0.0,
        weight_mean=weight / count,
        cut_share=cut / count,
        rejected_sequences=int(ranks.sum([rejected])[0]),
    )
    return importance, clipped / count, kl / count


def _trained_tokens(
    experience: Experience,
    trained_S: NDArray[np.bool_],
    old_R: NDArray[np.float32],
    reference_R: NDArray[np.float32] | None,
    sequences: NDArray[np.int64],
    logprobs_R: Tensor,
) -> Tokens:
    """Select the tokens of those that are trained; `logprobs_R`, of the policy as it is now, are of all `sequences`."""
    generation, lengths_S = experience.generation, experience.generation.response_lengths
    trained = sequences[trained_S[sequences]]
    of_trained_R = np.repeat(trained_S[sequences], lengths_S[sequences])
    # the response of each sequence in all tokens of the rollout
    rows_R = join_ranges(as_offsets(lengths_S)[trained], lengths_S[trained])
    advantages_S = experience.advantages_S[trained].astype(np.float32)
    device = logprobs_R.device
    return Tokens(
        logprobs_R.index_select(0, to_device(np.flatnonzero(of_trained_R), device)),
        to_device(old_R[rows_R], device),
        to_device(generation.logprobs_R[rows_R], device),
        None if reference_R is None else to_device(reference_R[rows_R], device),
        to_device(np.repeat(advantages_S, lengths_S[trained]), device),
        to_device(lengths_S[trained], device),
    )


def _micro_step_S(mini_batches: list[Stage], num_sequences: int) -> NDArray[np.int64]:
    micro_step_S = np.full(num_sequences, -1, np.int64)
    for number, sequences in enumerate(sequences for stage in mini_batches for sequences in stage.micro_steps):
        micro_step_S[sequences] = number
    return micro_step_S
