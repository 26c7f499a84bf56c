"""The oracle: an unpatched model of Hugging Face in float32 on a CPU, and sets of experts compared with its own."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute import RoutedLayer, RoutingSpec, RoutingTrace
from foreroute.testing.models import tiny
from tests.engines import small_policy

EXPERTS, TOP_K, LAYERS, VOCABULARY = 16, 4, 3, 64
SPEC = RoutingSpec(EXPERTS, TOP_K, tuple(RoutedLayer(layer) for layer in range(LAYERS)))
SIZES = small_policy.SIZES | {"max_position_embeddings": 512}
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Sequence:
    """One answered sequence, as `foreroute.capture.decode` read it, and the log-prob of each sampled token."""

    trace: RoutingTrace
    num_prompt: int
    logprobs_R: NDArray[np.float64]


class Reference:
    """A tiny Qwen3-MoE of random weights, and what it picks."""

    def __init__(self, seed: int):
        self.model = tiny("qwen3_moe", seed=seed, **SIZES).eval()

    def write(self, folder: Path) -> Path:
        self.model.save_pretrained(folder)
        return folder

    def forward(self, tokens: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Sorted experts [T, L, K] and log-probs [T, V] at `TEMPERATURE` of a whole sequence, without a cache."""
        with torch.no_grad():
            output = self.model(
                input_ids=torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True, use_cache=False
            )
        picked = [logits.topk(TOP_K).indices.sort().values for logits in output.router_logits]
        assert len(picked) == LAYERS
        logprobs_TV = (output.logits[0].double() / TEMPERATURE).log_softmax(-1)
        return torch.stack(picked, 1).numpy(), logprobs_TV.numpy()

    def differing(self, trace: RoutingTrace) -> list[tuple[int, int]]:
        """Rows and layers of a sequence whose set of experts is not the model's; absent rows are left out."""
        sets_TLK, _ = self.forward(trace.tokens(0))
        rows = np.flatnonzero(trace.valid_N)
        other_RL = (np.sort(trace.expert_ids_NLK[rows]) != sets_TLK[rows]).any(-1)
        return [(int(rows[row]), int(layer)) for row, layer in np.argwhere(other_RL)]

    def logprob_errors_R(self, sequence: Sequence) -> NDArray[np.float64]:
        """Distances of the engine's log-probs from the model's own, of each sampled token."""
        tokens = sequence.trace.tokens(0)
        _, logprobs_TV = self.forward(tokens)
        rows = np.arange(sequence.num_prompt - 1, len(tokens) - 1)
        return np.abs(logprobs_TV[rows, tokens[rows + 1]] - sequence.logprobs_R)


def planted(trace: RoutingTrace, row: int, layer: int) -> RoutingTrace:
    """The trace with one expert of one row exchanged for one that was not picked there."""
    ids_NLK = trace.expert_ids_NLK.copy()
    ids_NLK[row, layer, 0] = np.setdiff1d(np.arange(EXPERTS), ids_NLK[row, layer])[0]
    tokens = trace.tokens(0)
    return RoutingTrace.from_rows(
        trace.spec, [tokens], [ids_NLK], valid=[trace.valid_N], weight_versions=[np.zeros(len(tokens), np.int64)]
    )
