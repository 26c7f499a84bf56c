"""One engine against itself: passes of the same weights over the tokens of one rollout, computed in other ways.

An inference engine batches, cuts and caches as its load wants it. Each of these passes does one of that on purpose:

    whole       whole sequences, `BATCH` at a time; the others are compared with this one
    again       the same once more
    neighbours  the same, in other batches of as many
    alone       one sequence at a time
    chunks      `CHUNK` tokens at a time, on the key-value cache of those before: chunked prefill
    prefix      responses on the cache of their prompt, which was computed once for all of them: prefix cache
    sampled     the rollout itself: responses token by token on such a cache

Beside them the trainer stands against the same rollout, as in `static.py`, on its own routes and on the rollout's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.cells import Cell
from experiments.models import configuration
from experiments.starts import loaded
from experiments.static import figures_of
from foreroute.adapters.hf.response_logprobs import inputs, pad
from foreroute.capture import Generation
from foreroute.core.caches import named_cache
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.mismatch import RoutingMismatch, TokenMismatch, routing_mismatch, token_mismatch
from foreroute.records.step_record import Side
from foreroute.train.loop import Trainer, make_schedule, make_trainer
from foreroute.train.policy import Alone
from foreroute.train.record import Experience, mismatch_of

BATCH = 64
CHUNK = 8

Batches = Sequence[NDArray[np.int64]]
"""The sequences of each forward."""


def run_noise(cell: Cell, base: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Sample as `run_static` does, and hold every other pass of the same engine against whole sequences."""
    config = configuration(base, cell.settings, cell.seed)
    task, policy = loaded(config, checkpoint)
    engine = ScoringEngine(policy.model, config.rollout.precision)
    trainer = make_trainer(config, task, policy, engine)
    experience = trainer.roll_out()
    whole, others = passes(
        engine, experience.generation, config.rollout.group_size, config.rollout.temperature, config.seed
    )
    own = {name: figures_of(*compared(other, whole)) for name, other in others.items()}
    return against_trainer(trainer, experience) | own


def against_trainer(trainer: Trainer, experience: Experience) -> dict[str, Any]:
    """The trainer's mismatch with its rollout, on its own routes and on the rollout's."""
    recompute, _ = make_schedule(experience, trainer.config.rl, Alone(), seed=(trainer.config.seed, 0))
    sides: dict[str, Side] = {"trainer": "native", "trainer R3": "replayed"}
    results = {name: trainer.recompute(experience.generation, recompute, side) for name, side in sides.items()}
    return {name: figures_of(*mismatch_of(experience.generation, result)) for name, result in results.items()}


def passes(
    engine: ScoringEngine, generation: Generation, group_size: int, temperature: float, seed: int
) -> tuple[Generation, dict[str, Generation]]:
    """Give the pass over whole sequences of a rollout, groups of one prompt together, and all others by name."""
    size, kept = len(generation), np.arange(len(generation))
    batches = list(batches_of(generation, kept, BATCH // group_size * group_size))
    elsewhere = np.random.default_rng(seed).permutation(size)

    def score(batches: Batches, **how: int) -> Generation:
        return engine.score(generation, batches, temperature, **how)

    return score(batches), {
        "again": score(batches),
        "neighbours": score(list(batches_of(generation, elsewhere, len(batches[0])))),
        "alone": score(list(batches_of(generation, kept, 1))),
        "chunks": score(batches, chunk=CHUNK),
        "prefix": score(batches, group=group_size),
        "sampled": generation,
    }


def batches_of(generation: Generation, order_S: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    """Batches of at most so many sequences in this order, whose prompts are of one length."""
    lengths_S = generation.prompt_lengths[order_S]
    for length in np.unique(lengths_S):
        same = order_S[lengths_S == length]
        yield from np.split(same, np.arange(size, len(same), size))


def compared(one: Generation, other: Generation) -> tuple[TokenMismatch, RoutingMismatch]:
    """Two passes over the same tokens: what `mismatch_of` gives of a trainer and an engine."""
    return token_mismatch(one.logprobs_R, other.logprobs_R), routing_mismatch(other.trace, one.trace)


class ScoringEngine(EmbeddedEngine):
    """The embedded engine, which also computes tokens that are already there."""

    @torch.no_grad()
    def score(
        self, generation: Generation, batches: Batches, temperature: float, *, chunk: int = 0, group: int = 1
    ) -> Generation:
        """Compute routes and log-probs of a generation's tokens anew, in batches of prompts of one length.

        `chunk` are tokens of a sequence in a forward, 0 for all; `group` neighbours have one prompt, computed once.
        """
        parts = [self._scored(generation.select(batch), temperature, chunk, group) for batch in batches]
        # batches took sequences out of order; figures compare them one by one
        return Generation.concatenate(parts).select(np.argsort(np.concatenate(batches)))

    def _scored(self, part: Generation, temperature: float, chunk: int, group: int) -> Generation:
        tokens = [part.trace.tokens(s) for s in range(len(part))]
        ids_BT, mask_BT = (torch.from_numpy(array) for array in pad(inputs(part.trace)))
        # what pads a sequence follows it, so that none of its own tokens sees it
        shared = int(part.prompt_lengths[0]) if group > 1 else 0
        logits: list[Tensor] = []
        caches: dict[str, Any] = {}
        if shared:
            with self._recording() as recording:
                output = self._model(input_ids=ids_BT[::group, :shared], use_cache=True)
            prompts = recording.trace().select(np.repeat(np.arange(len(part) // group), group))
            caches = named_cache(output)
            for cache in caches.values():
                cache.batch_repeat_interleave(group)
            logits.append(output.logits.repeat_interleave(group, dim=0))
        rest_BT = ids_BT[:, shared:]
        with self._recording() as recording:
            for ids_BC in rest_BT.split(chunk or max(1, rest_BT.shape[1]), dim=1):
                if ids_BC.shape[1]:
                    output = self._model(input_ids=ids_BC, use_cache=True, **caches)
                    caches = named_cache(output)
                    logits.append(output.logits)
        trace = recording.rollout([each[shared:] for each in tokens])
        targets = torch.from_numpy(np.concatenate([part.response(s) for s in range(len(part))])).long()
        predicts_BT = mask_BT.bool()
        predicts_BT[predicts_BT.clone()] = torch.from_numpy(part.targets_N)
        logits_RV = torch.cat(logits, dim=1)[predicts_BT].float() / temperature
        logprobs_R = logits_RV.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        whole = prompts.continued_by(trace) if shared else trace
        return replace(part, trace=whole, logprobs_R=logprobs_R.numpy())
