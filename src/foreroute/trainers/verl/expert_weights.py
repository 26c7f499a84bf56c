"""Whether the rollout engine computes with the trainer's weights, seen from the tokens of each expert.

In verl's old-log-prob pass under R3 both sides have the same tokens, experts and, if the last sync went well, weights.
What is left of k3 is their precisions. Weights that arrived nowhere, or in wrong places, are far above that in the
tokens that they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import EngineError
from foreroute.trace import RoutingSpec, RoutingTrace

K3_LIMIT = 0.1
"""k3, in nats, above which two sides do not hold the same weights. Runs of verl with vLLM were at 4e-4 in bfloat16,
and at 0.5 where a sync had put experts' weights in wrong places."""
MOST_OF_A_TOKEN, MIN_TOKENS = 1.0, 64
"""What a token adds at most, and how many an expert must have before its own k3 is judged: a few tokens far apart, as
precisions leave behind, must not end a run, while wrong weights put most tokens of an expert apart."""


class ExpertWeightsCheck:
    """Sums of k3, at most 1 of a token, over the tokens of each expert, judged once for each rollout.

    Args:
        spec: of the policy.
    """

    def __init__(self, spec: RoutingSpec) -> None:
        self._spec = spec
        self._k3_LE, self._tokens_LE = np.zeros((2, spec.num_layers, spec.num_experts))

    def add(
        self,
        executed: RoutingTrace,
        sampled: Sequence[NDArray[np.float32]],
        trained: Sequence[NDArray[np.float32]],
        counted: Sequence[NDArray[np.bool_]],
    ) -> None:
        """Tokens of responses, each at the end of its sequence.

        Args:
            executed: the routes of S sequences, as the trainer took them.
            sampled: S arrays [R], log-probs that the rollout sampled with, NaN where not known.
            trained: S arrays [R], the trainer's.
            counted: S arrays [R], True where a token was sampled.
        """
        known = [one & ~np.isnan(logprobs) for one, logprobs in zip(counted, sampled, strict=True)]
        # the row before a token computed it
        rows = [end - 1 - len(one) + np.flatnonzero(one) for end, one in zip(executed.offsets[1:], known, strict=True)]
        pairs = [(ours[one], theirs[one]) for ours, theirs, one in zip(trained, sampled, known, strict=True)]
        log_r = np.concatenate([ours.astype(np.float64) - theirs for ours, theirs in pairs])
        k3_R = np.minimum(np.expm1(log_r) - log_r, MOST_OF_A_TOKEN)
        ids_RLK = executed.expert_ids_NLK[np.concatenate(rows)]
        for layer in range(self._spec.num_layers):
            ids_RK = ids_RLK[:, layer]
            weights = np.repeat(k3_R, ids_RK.shape[1])
            self._k3_LE[layer] += np.bincount(ids_RK.ravel(), weights, self._spec.num_experts)
            self._tokens_LE[layer] += np.bincount(ids_RK.ravel(), minlength=self._spec.num_experts)

    def judge(self, reduce: Callable[[Tensor], Tensor]) -> None:
        """Judge the tokens of all processes since the last call. A collective: every process calls it.

        Args:
            reduce: a tensor float64 [...] of the CPU in, the sum over all processes out.

        Raises:
            EngineError: when k3 over all tokens, or over those of one expert, is above the limit.
        """
        k3_LE, tokens_LE = reduce(torch.from_numpy(np.stack([self._k3_LE, self._tokens_LE]))).cpu().numpy()
        self._k3_LE, self._tokens_LE = np.zeros((2, *k3_LE.shape))
        # every token counts equally often
        everywhere = k3_LE.sum() / max(tokens_LE.sum(), 1)
        mean_LE = np.where(tokens_LE >= MIN_TOKENS, k3_LE / np.maximum(tokens_LE, 1), 0.0)
        layer, expert = np.unravel_index(mean_LE.argmax(), mean_LE.shape)
        worst = mean_LE[layer, expert]
        if max(everywhere, worst) <= K3_LIMIT:
            return
        of_one = f", and {worst:.3g} for those of expert {expert} in {self._spec.layers[layer]}" if worst else ""
        raise EngineError(
            f"the rollout's log-probs are {everywhere:.3g} nats (k3) from the trainer's on the same experts{of_one}; "
            f"expected at most {K3_LIMIT} in any precision. Weights did not arrive in the rollout engine at the last "
            "sync, or it samples from another distribution than it reports (temperature, top_p, top_k). Compare its "
            "log-probs of a fixed text with those of a checkpoint"
        )
