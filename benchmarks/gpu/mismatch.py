"""Distance of rollout and trainer on this device, both in bfloat16 with the same weights.

A rollout decodes token by token over a key-value cache, as engines do; a trainer runs whole sequences. They multiply
matrices of other shapes, so that they round otherwise, and tokens near a tie go to other experts. The same holds of two
trainers that batch the sequences otherwise. Each pair is measured as it is, and with the routes of the first replayed
in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.figures import Figures
from benchmarks.gpu.layers import LAYER_BYTES, SMALL_LAYER, TRUE_LAYER, layered_model, layers_that_fit, random_tokens
from foreroute.adapters import hf
from foreroute.core.caches import named_cache
from foreroute.mismatch import TokenMismatch, routing_mismatch, token_mismatch
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
    alone: int


FULL = Scale(vocabulary=32_768, sequences=64, prompt=128, response=192, batch=16, alone=8)
SMALL = Scale(vocabulary=256, sequences=8, prompt=8, response=24, batch=4, alone=4)


@dataclass(frozen=True)
class Observed:
    """Sequences as one side saw them, in their order: log-probs of response tokens, and the routes that ran."""

    logprobs: list[NDArray[np.float64]]
    trace: RoutingTrace

    def of(self, sequences: Sequence[int]) -> Observed:
        """Select sequences."""
        return Observed([self.logprobs[s] for s in sequences], self.trace.select(np.asarray(sequences)))


@dataclass(frozen=True)
class Sampled:
    """A rollout: tokens int64 [T] of each sequence, prompts of one length, responses of different ones."""

    tokens: list[NDArray[np.int64]]
    prompt: int
    observed: Observed


@dataclass(frozen=True)
class Setting:
    """A trainer and how it lays out a rollout: which sequences run together, and padded or packed into one row."""

    routed: hf.RoutedTransformer
    sampled: Sampled
    batches: list[list[int]]
    shape: Literal["padded", "packed"] = "padded"


def run(figures: Figures) -> None:
    """Measure one rollout against trainers of several layouts."""
    scale = FULL if figures.full else SMALL
    num_layers = layers_that_fit(figures.device, LAYER_BYTES, SPARE_BYTES, MOST_LAYERS) if figures.full else 4
    model = layered_model(figures.device, num_layers, scale.vocabulary, TRUE_LAYER if figures.full else SMALL_LAYER)
    with torch.no_grad():
        # logits of random weights are nearly flat, and rounding would move no sampled token's probability
        model.lm_head.weight.mul_(SHARPNESS)
    routed = hf.attach(model)
    sampled = sample(routed, scale, figures.device)
    figures.record(layers=num_layers, sequences=scale.sequences, tokens=sampled.observed.trace.num_rows)
    everything = list(range(scale.sequences))
    batches = _in_batches(everything, scale.batch)
    others = _in_batches(np.random.default_rng(0).permutation(scale.sequences).tolist(), max(scale.batch // 2, 1) + 1)
    trainer = train_side(Setting(routed, sampled, batches))
    _compare(figures, "decode", sampled.observed, trainer, Setting(routed, sampled, batches))
    again = train_side(Setting(routed, sampled, batches))
    same = all(np.array_equal(a, b) for a, b in zip(trainer.logprobs, again.logprobs, strict=True))
    figures.record(repeat_same_bits=same, **_figures("repeat", trainer, again))
    _compare(figures, "other_batches", trainer, None, Setting(routed, sampled, others))
    _compare(figures, "packed", trainer, None, Setting(routed, sampled, batches, "packed"))
    alone = everything[: scale.alone]
    _compare(figures, "alone", trainer.of(alone), None, Setting(routed, sampled, [[s] for s in alone]))


@torch.no_grad()
def sample(routed: hf.RoutedTransformer, scale: Scale, device: torch.device) -> Sampled:
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
    return Sampled(rows, scale.prompt, Observed(kept, recording.rollout(rows)))


def train_side(setting: Setting, routes: RoutingTrace | None = None) -> Observed:
    """Run whole sequences, on their own routes or on given ones; what is seen is in the order of the sequences."""
    order = np.argsort(np.concatenate(setting.batches))
    sequences = sorted(s for batch in setting.batches for s in batch)
    model = setting.routed.model
    logprobs, traces = [], []
    for batch in setting.batches:
        tokens = [setting.sampled.tokens[s] for s in batch]
        arguments = _padded(tokens) if setting.shape == "padded" else _packed(tokens)
        arguments = {name: value.to(next(model.parameters()).device) for name, value in arguments.items()}
        with torch.no_grad(), setting.routed.record() as recording, ExitStack() as stack:
            if routes is not None:
                stack.enter_context(setting.routed.replay(routes.select(np.searchsorted(sequences, batch))))
            logits = model(**arguments, use_cache=False).logits
        traces.append(recording.trace())
        logprobs += _of_responses(logits, tokens, setting)
    return Observed([logprobs[place] for place in order], concatenate(traces).select(order))


def _in_batches(sequences: list[int], size: int) -> list[list[int]]:
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


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


def _of_responses(logits_BTV: Tensor, tokens: list[NDArray[np.int64]], setting: Setting) -> list[NDArray[np.float64]]:
    """The log-probability of each response token, which the logits of the position before it give."""
    prompt, packed = setting.sampled.prompt, setting.shape == "packed"
    begun = np.cumsum([0, *map(len, tokens)])
    found = []
    for row, each in enumerate(tokens):
        start = int(begun[row]) if packed else 0
        logits_RV = logits_BTV[0 if packed else row, start + prompt - 1 : start + len(each) - 1]
        targets_R1 = torch.from_numpy(each[prompt:]).to(logits_RV.device)[:, None]
        logprobs_R = logits_RV.float().log_softmax(-1).gather(1, targets_R1)[:, 0]
        found.append(logprobs_R.double().cpu().numpy())
    return found


def _compare(figures: Figures, name: str, reference: Observed, native: Observed | None, setting: Setting) -> None:
    """Compare a trainer with a rollout or another trainer, on its own routes and on those of the reference.

    Raises `AssertionError` when replay executed other routes, or did not bring probabilities nearer where many differ.
    """
    found = _figures(name, reference, native or train_side(setting))
    replayed = train_side(setting, reference.trace)
    tokens = _between(reference, replayed)
    found |= {f"{name}_replayed_k3_nats": tokens.k3, f"{name}_replayed_f2_share": tokens.f(2.0)}
    figures.record(**found)
    differing = routing_mismatch(reference.trace, replayed.trace).differing_share
    if differing:
        raise AssertionError(f"{name}: {differing:.3%} of the routes that replay executed are not those it was given")
    k3 = found[f"{name}_k3_nats"]
    if found[f"{name}_differing_tokens_share"] >= ENOUGH_DIFFER and tokens.k3 >= k3:
        raise AssertionError(f"{name}: k3 is {tokens.k3:.3g} with replay and {k3:.3g} without; expected less")


def _figures(name: str, reference: Observed, other: Observed) -> dict[str, Any]:
    routing = routing_mismatch(reference.trace, other.trace)
    tokens = _between(reference, other)
    return {
        f"{name}_differing_routers_share": routing.differing_share,
        f"{name}_differing_tokens_share": routing.differing_tokens_share,
        f"{name}_differing_by_layer_share": [round(share, 5) for share in routing.differing_share_L.tolist()],
        f"{name}_k3_nats": tokens.k3,
        f"{name}_f2_share": tokens.f(2.0),
    }


def _between(reference: Observed, other: Observed) -> TokenMismatch:
    return token_mismatch(np.concatenate(other.logprobs), np.concatenate(reference.logprobs))
