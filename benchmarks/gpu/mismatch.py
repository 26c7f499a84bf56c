"""Distance of rollout and trainer on this device, both in bfloat16 with the same weights.

A rollout decodes token by token over a key-value cache, as engines do; a trainer runs whole sequences. They multiply
matrices of other shapes, so that they round otherwise, and tokens near a tie go to other experts. The same holds of two
trainers of which one pads its batches and the other packs them. Each pair is measured as it is, and with the routes of
the first replayed in the second.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.figures import Figures
from benchmarks.gpu.layers import LAYER_BYTES, SMALL_LAYER, TRUE_LAYER, layered_model, layers_that_fit, random_tokens
from foreroute.adapters import hf
from foreroute.core.caches import named_cache
from foreroute.mismatch import routing_mismatch, token_mismatch
from foreroute.trace import RoutingTrace, concatenate

SPARE_BYTES = 14e9
MOST_LAYERS = 48
"""All that Qwen3-30B-A3B has."""
SHARPNESS = 3.0
"""By how much the output head is scaled: logits of tokens then spread by about 3 nats."""
ENOUGH_DIFFER = 0.01
"""From this share of tokens with another route on, replay must bring the probabilities nearer."""


@dataclass(frozen=True)
class Scale:
    """Sizes: of the model, and of what is sampled."""

    vocabulary: int
    sequences: int
    prompt: int
    response: int
    batch: int


FULL = Scale(vocabulary=32_768, sequences=64, prompt=128, response=192, batch=16)
SMALL = Scale(vocabulary=256, sequences=8, prompt=8, response=24, batch=4)
Shape = Literal["padded", "packed"]


@dataclass(frozen=True)
class Observed:
    """Sequences as one side saw them: log-probs of response tokens, and the routes that ran."""

    logprobs: NDArray[np.float64]
    trace: RoutingTrace


@dataclass(frozen=True)
class Trainer:
    """A trainer that runs a rollout: tokens int64 [T] of each sequence, prompts of one length, in batches."""

    routed: hf.RoutedTransformer
    tokens: list[NDArray[np.int64]]
    scale: Scale

    @torch.no_grad()
    def seen(self, shape: Shape, routes: RoutingTrace | None = None) -> Observed:
        """Run whole sequences, padded or packed into one row, on their own routes or on given ones."""
        model = self.routed.model
        logprobs, traces = [], []
        for start in range(0, len(self.tokens), self.scale.batch):
            tokens = self.tokens[start : start + self.scale.batch]
            arguments = _padded(tokens) if shape == "padded" else _packed(tokens)
            arguments = {name: value.to(next(model.parameters()).device) for name, value in arguments.items()}
            own = None if routes is None else routes.select(np.arange(start, start + len(tokens)))
            with self.routed.record() as recording, nullcontext() if own is None else self.routed.replay(own):
                logits = model(**arguments, use_cache=False).logits
            traces.append(recording.trace())
            logprobs += _of_responses(logits, tokens, self.scale.prompt, shape)
        return Observed(np.concatenate(logprobs), concatenate(traces))


def run(figures: Figures) -> None:
    """Measure one rollout against a trainer, and that trainer against one that packs."""
    scale = FULL if figures.full else SMALL
    num_layers = layers_that_fit(figures.device, LAYER_BYTES, SPARE_BYTES, MOST_LAYERS) if figures.full else 4
    model = layered_model(figures.device, num_layers, scale.vocabulary, TRUE_LAYER if figures.full else SMALL_LAYER)
    with torch.no_grad():
        # logits of random weights are nearly flat, and rounding would move no sampled token's probability
        model.lm_head.weight.mul_(SHARPNESS)
    routed = hf.attach(model)
    tokens, rollout = sample(routed, scale, figures.device)
    figures.record(layers=num_layers, sequences=scale.sequences, tokens=rollout.trace.num_rows)
    trainer = Trainer(routed, tokens, scale)
    padded = trainer.seen("padded")
    _compare(figures, "decode", rollout, padded, trainer.seen("padded", rollout.trace))
    _compare(figures, "packed", padded, trainer.seen("packed"), trainer.seen("packed", padded.trace))


@torch.no_grad()
def sample(
    routed: hf.RoutedTransformer, scale: Scale, device: torch.device
) -> tuple[list[NDArray[np.int64]], Observed]:
    """Decode responses to random prompts, and cut them to lengths from a quarter on."""
    generator = torch.Generator(device).manual_seed(0)
    prompts = random_tokens(device, scale.vocabulary, (scale.sequences, scale.prompt))
    tokens, logprobs = [], []
    with routed.record() as recording:
        output = routed.model(input_ids=prompts, use_cache=True, logits_to_keep=1)
        for step in range(scale.response):
            logprobs_SV = output.logits[:, -1].float().log_softmax(-1)
            token_S1 = torch.multinomial(logprobs_SV.exp(), 1, generator=generator)
            tokens.append(token_S1)
            logprobs.append(logprobs_SV.gather(1, token_S1))
            if step + 1 < scale.response:  # the last token is sampled, and never an input
                output = routed.model(input_ids=token_S1, use_cache=True, **named_cache(output))
    whole = torch.cat([prompts, *tokens], 1).cpu().numpy()
    logprobs_ST = torch.cat(logprobs, 1).double().cpu().numpy()
    lengths = np.random.default_rng(1).integers(max(scale.response // 4, 1), scale.response + 1, scale.sequences)
    rows = [row[: scale.prompt + length] for row, length in zip(whole, lengths, strict=True)]
    kept = [row[:length] for row, length in zip(logprobs_ST, lengths, strict=True)]
    return rows, Observed(np.concatenate(kept), recording.rollout(rows))


def _padded(tokens: list[NDArray[np.int64]]) -> dict[str, Tensor]:
    """One sequence per row, padded on the right."""
    longest = max(map(len, tokens))
    ids = np.zeros((len(tokens), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, each in enumerate(tokens):
        ids[row, : len(each)], mask[row, : len(each)] = each, 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def _packed(tokens: list[NDArray[np.int64]]) -> dict[str, Tensor]:
    """Pack all into one row, told apart by their positions."""
    positions = np.concatenate([np.arange(len(each)) for each in tokens])
    ids = np.concatenate(tokens)
    return {"input_ids": torch.from_numpy(ids)[None], "position_ids": torch.from_numpy(positions)[None]}


def _of_responses(
    logits_BTV: Tensor, tokens: list[NDArray[np.int64]], prompt: int, shape: Shape
) -> list[NDArray[np.float64]]:
    """The log-probability of each response token, which the logits of the position before it give."""
    rows = logits_BTV[0].split(list(map(len, tokens))) if shape == "packed" else logits_BTV
    found = []
    for each, logits_TV in zip(tokens, rows, strict=True):
        logits_RV = logits_TV[prompt - 1 : len(each) - 1]
        targets_R1 = torch.from_numpy(each[prompt:]).to(logits_RV.device)[:, None]
        logprobs_R = logits_RV.float().log_softmax(-1).gather(1, targets_R1)[:, 0]
        found.append(logprobs_R.double().cpu().numpy())
    return found


def _compare(figures: Figures, name: str, reference: Observed, native: Observed, replayed: Observed) -> None:
    """Compare a trainer with a rollout or another trainer, on its own routes and on those of the reference.

    Raises `AssertionError` when replay executed other routes, or did not bring probabilities nearer where many differ.
    """
    routing = routing_mismatch(reference.trace, native.trace)
    before, after = (token_mismatch(other.logprobs, reference.logprobs) for other in (native, replayed))
    found = {
        "differing_routers_share": routing.differing_share,
        "differing_tokens_share": routing.differing_tokens_share,
        "differing_by_layer_share": [round(share, 5) for share in routing.differing_share_L.tolist()],
        "k3_nats": before.k3,
        "f2_share": before.f(2.0),
        "replayed_k3_nats": after.k3,
        "replayed_f2_share": after.f(2.0),
    }
    figures.record(**{f"{name}_{figure}": value for figure, value in found.items()})
    differing = routing_mismatch(reference.trace, replayed.trace).differing_share
    if differing:
        raise AssertionError(f"{name}: {differing:.3%} of the routes that replay executed are not those it was given")
    if routing.differing_tokens_share >= ENOUGH_DIFFER and after.k3 >= before.k3:
        raise AssertionError(f"{name}: k3 is {after.k3:.3g} with replay and {before.k3:.3g} without; expected less")
