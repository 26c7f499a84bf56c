"""Memory that update passes will take on every rank, forecast before they run, against `parallel.memory_budget`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from foreroute.adapters.hf import RoutedTransformer
from foreroute.adapters.hf.memory import draw_micro_batches, measure_memory
from foreroute.adapters.hf.response_logprobs import inputs, response_log_probs
from foreroute.capture import Generation
from foreroute.costs.memory import BatchSizes, MemoryForecast, StepMemory
from foreroute.layout.packing import padded_batches
from foreroute.plan import StepPlan, Topology, known_rows
from foreroute.train.config import TrainConfig
from foreroute.train.policy import Alone, ScheduledPass

MOMENTS = 2
"""Numbers that AdamW keeps for a weight."""


class MemoryBudget:
    """Forecasts of a run whose experts are spread. Methods are collective calls."""

    def __init__(self, policy: RoutedTransformer, config: TrainConfig, ranks: Alone, topology: Topology) -> None:
        self._policy, self._ranks, self._rl, self._topology = policy, ranks, config.rl, topology
        self._budget, self._temperature = config.parallel.memory_budget, config.rollout.temperature
        self._memory: StepMemory | None = None

    def __bool__(self) -> bool:
        return self._budget > 0

    def fits(self, forecast: MemoryForecast) -> bool:
        """Say whether no rank takes more than it may in any micro-step."""
        return int(forecast.bytes_MG.max()) <= self._budget

    def forecast(
        self,
        planned: ScheduledPass,
        lengths_S: NDArray[np.int64],  # tokens that are put in, of each sequence of this rank
        targets_S: NDArray[np.int64],  # rows of logits
        counts_MLGE: NDArray[np.integer],
        plan: StepPlan,
        kept: StepPlan | None,  # of the recompute, where its slots are still there
        optimizer: torch.optim.Optimizer,
    ) -> MemoryForecast:
        """Forecast the peaks of an update pass under its plan, the same on all ranks."""
        if self._memory is None:
            self._memory = self._measured()
        widths = [(sequences, int(lengths_S[sequences].max())) for sequences in planned.micro_steps]
        own_M3 = [(len(s) * width, len(s) * width**2, int(targets_S[s].sum())) for s, width in widths]
        sizes = BatchSizes(*self._ranks.all_gather(np.array(own_M3, np.int64)).transpose(2, 1, 0))
        known = known_rows(counts_MLGE, plan, top_k=self._policy.spec.top_k)
        resident_G = self._ranks.all_gather(np.array([self._resident(optimizer)]))[:, 0]
        found = self._memory.forecast(known, sizes, plan, resident=resident_G, kept=kept)
        return replace(found, bytes_MG=self._ranks.max(found.bytes_MG))

    def one_more(self, planned: ScheduledPass, lengths_S: NDArray[np.int64], forecast: MemoryForecast) -> ScheduledPass:
        """Pack a pass, above the budget by a forecast, into one micro-step more.

        Raises:
            ForecastError: naming rank, micro-step and layer, where a rank has no sequence for it.
        """
        sequences, count = np.concatenate(planned.micro_steps), len(planned.micro_steps) + 1
        if -int(self._ranks.max([-len(sequences)])[0]) < count:
            forecast.require(self._budget)
        return replace(planned, micro_steps=pack_padded(sequences, lengths_S, self._rl.micro_step_tokens, count))

    def _measured(self) -> StepMemory:
        """Measure the policy on small micro-batches, with the head and the loss as updates have them."""
        model: Any = self._policy.model
        rng = np.random.default_rng(self._ranks.rank)
        wholes = draw_micro_batches(self._policy.spec, model.get_input_embeddings().num_embeddings)
        generations = []
        for whole in wholes:
            prompts_S = rng.integers(1, whole.lengths)
            generations.append(
                Generation(whole, prompts_S, np.zeros(int((whole.lengths - prompts_S).sum()), np.float32))
            )

        def compute_loss(number: int) -> Tensor:
            logprobs_R, _ = response_log_probs(model, generations[number], self._temperature)
            return logprobs_R.sum()

        targets_M = [len(each.logprobs_R) for each in generations]
        traces = [inputs(whole) for whole in wholes]
        return measure_memory(self._policy, traces, targets_M, compute_loss, self._topology)

    def _resident(self, optimizer: torch.optim.Optimizer) -> int:
        """Give the bytes of this rank that a micro-step finds: weights, gradients, AdamW's moments, and what else."""
        weights = [_local(each) for each in self._policy.model.parameters()]
        trained = sum(_local(each).nbytes for each in self._policy.model.parameters() if each.requires_grad)
        if weights[0].is_cuda:
            moments = 0 if optimizer.state else MOMENTS * trained
            return torch.cuda.memory_allocated(weights[0].device) + trained + moments
        return sum(each.nbytes for each in weights) + (1 + MOMENTS) * trained


def pack_padded(
    sequences: NDArray[np.int64], lengths_S: NDArray[np.int64], token_budget: int, fewest: int = 0
) -> list[NDArray[np.int64]]:
    """Pack sequences into `fewest` micro-steps or more: those of like lengths share one, so that little is padded."""
    longest_first = np.argsort(-lengths_S[sequences], kind="stable")
    batches: Sequence[NDArray[np.int64]] = padded_batches(
        lengths_S[sequences[longest_first]], token_budget, min_count=fewest
    )
    # within a micro-step they keep the order that they were given in
    return [sequences[np.sort(longest_first[batch])] for batch in batches]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
