"""Evidence from a model and a generation: its wiring, and what it computes. The torch side of the doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters import hf
from foreroute.adapters.hf.attaching import about_packed
from foreroute.adapters.hf.response_logprobs import response_logits, sampled_tokens
from foreroute.capture import Generation
from foreroute.conformance import ALL_CHECKS, AdapterUnderTest, Case, Unsupported, run_conformance
from foreroute.conformance.huggingface import HuggingFaceModel
from foreroute.doctor.evidence import Evidence, Rescored, TrainerPass
from foreroute.errors import AttachError, BatchMismatchError, TraceError
from foreroute.layout.packing import padded_batches
from foreroute.mismatch import token_mismatch
from foreroute.mismatch.decisions import misplaced_masks
from foreroute.replay import masked_logprobs_of_logits
from foreroute.trace import INDEXER, SAMPLING, RoutingTrace, concatenate

QUICK = tuple(check.id for check in ALL_CHECKS if check.quick)
FAR = 1e-2
"""k3, in nats, from which log-probs are taken otherwise too, to find out how the engine took its own."""
TEMPERATURES = tuple(tenths / 10 for tenths in range(1, 21))
"""Those that people set."""
LOGITS_BYTES = 1 << 26
"""Most bytes of float32 logits at a time: 447 rows of a vocabulary of 150,000."""
Reading = tuple[float, bool]
"""A temperature, and whether log-probs are taken on the sampling masks."""


def examine(
    model: Any,
    generation: Generation | None,
    *,
    trace: RoutingTrace | None = None,
    temperature: float = 1.0,
    micro_step_tokens: int = 4096,
    expected_version: int | None = None,
    random_weights: bool = False,
) -> Evidence:
    """Attach to a model, run the quick checks on it, and run it over the sequences without and with replay.

    The model is put into eval mode and run without gradients; nothing else about it is changed.

    Args:
        model: a Hugging Face causal language model.
        generation: S sequences with the engine's log-probs, or None to look at the routes of `trace` alone.
        trace: routes without log-probs. Sequences of fewer than two tokens are left out.
        temperature: that the engine divided its logits by.
        micro_step_tokens: tokens of one forward, with padding; as many as the longest sequence has, where that is more.
        expected_version: the weight version that the trainer is at.
        random_weights: recorded in the evidence.

    Raises:
        BatchMismatchError: when no sequence of the trace has two tokens.
    """
    # dropout would make the trainer differ from itself
    model.eval()
    given: dict[str, Any] = {"expected_version": expected_version, "random_weights": random_weights}
    try:
        routed = hf.attach(model)
    except AttachError as error:
        return Evidence(attach_error=str(error), **given)
    given |= {"has_indexers": routed.indexers is not None, "packed_routers": about_packed(routed.routers)}
    given["conformance"] = run_conformance(_InPlace(routed), only=QUICK)
    sequences = generation or (None if trace is None else _without_logprobs(trace))
    if sequences is None:
        return Evidence(**given)
    given["engine_logprobs_R"] = None if generation is None else generation.logprobs_R
    given |= {"response_lengths_S": sequences.response_lengths, "prompt_lengths_S": sequences.prompt_lengths}
    return _passes(routed, sequences, temperature, micro_step_tokens, given)


def _passes(
    routed: hf.RoutedTransformer, sequences: Generation, temperature: float, budget: int, given: dict[str, Any]
) -> Evidence:
    trace = sequences.trace
    try:
        trace = routed.with_lookups(trace)
        sequences = replace(sequences, trace=trace)
    except TraceError as error:
        return Evidence(replay_error=str(error), **given)
    # asked here, since an embedding on a GPU answers such a token with an assertion of the device
    vocabulary = _vocabulary(routed.model)
    if trace.num_rows and int(trace.token_ids_N.max()) >= vocabulary:
        error_text = f"it holds token {int(trace.token_ids_N.max())}, the model's vocabulary has {vocabulary}"
        return Evidence(replay_error=error_text, **given)
    if wrong := misplaced_masks(trace):
        given |= {"mask_error": wrong, "engine_logprobs_R": None}
    if given["engine_logprobs_R"] is None:
        # nothing is compared with log-probs on the masks, and of routes alone nobody says which tokens were sampled
        sequences = replace(sequences, trace=trace.without_streams(SAMPLING))
    together = padded_batches(trace.lengths, int(trace.lengths.max(initial=budget)))
    # another order of sums, whose difference no engine can undercut
    alone = [np.array([s]) for s in range(len(trace))]
    has_sets = SAMPLING in sequences.trace.streams
    reading = (temperature, has_sets)

    def trainer_pass(batches: Sequence[NDArray[np.int64]], *, replay: bool = False) -> TrainerPass:
        return _run(routed, sequences, batches, [reading], replay=replay)[0]

    # the same batches twice tell whether kernels repeat, single sequences whether packing matters
    native, repeated, repacked = (trainer_pass(batches) for batches in (together, together, alone))
    given |= {"engine": trace, "native": native, "repeated": repeated, "repacked": repacked}
    try:
        replayed = trainer_pass(together, replay=True)
    except TraceError as error:
        return Evidence(replay_error=str(error), **given)
    engine = given["engine_logprobs_R"]
    # many readings of the same logits, in one more pass, where the two are too far apart for precision
    if engine is not None and replayed.logprobs_R is not None and token_mismatch(replayed.logprobs_R, engine).k3 > FAR:
        readings = [(t, on_sets) for on_sets in sorted({False, has_sets}) for t in TEMPERATURES]
        passes = _run(routed, sequences, together, readings, replay=True)
        given["rescored"] = tuple(
            Rescored(*how, each.logprobs_R)
            for how, each in zip(readings, passes, strict=True)
            if each.logprobs_R is not None
        )
    return Evidence(replayed=replayed, **given)


@torch.no_grad()
def _run(
    routed: hf.RoutedTransformer,
    sequences: Generation,
    batches: Sequence[NDArray[np.int64]],
    readings: Sequence[Reading],
    *,
    replay: bool = False,
) -> list[TrainerPass]:
    """Run one pass over all sequences, in their order: by each reading its log-probs, and of every one its routes."""
    recorded: list[RoutingTrace] = []
    deficits: list[NDArray[Any]] = []
    logprobs: list[list[NDArray[Any]]] = [[] for _ in readings]
    rows_at_once = max(1, LOGITS_BYTES // (4 * _vocabulary(routed.model)))
    for chosen in batches:
        part = sequences.select(chosen)
        forced: AbstractContextManager[Any] = routed.replay(part.trace) if replay else nullcontext()
        choices = routed.indexers is not None and INDEXER in part.trace.streams and not replay
        # under replay what ran is known, and what routers would choose there is not
        with forced, routed.record(indexers=choices, native=replay) as recording:
            logits = response_logits(routed.model, part, whole=True, rows_at_once=rows_at_once)
        recorded.append(recording.trace())
        if replay:
            deficits += np.split(recording.deficits_NL(), recorded[-1].offsets[1:-1])
        ends = np.cumsum(part.response_lengths)[:-1]
        for parts, logprobs_R in zip(logprobs, _logprobs(part, logits, readings), strict=True):
            parts += np.split(logprobs_R, ends)
    # batches are of like lengths; the caller has sequences in the order of the rollout
    back = np.argsort(np.concatenate(batches))
    routes = concatenate(recorded).select(back)
    found = [np.concatenate([parts[int(s)] for s in back]) for parts in logprobs]
    if not replay:
        return [TrainerPass(routes, logprobs_R) for logprobs_R in found]
    deficits_NL = np.concatenate([deficits[int(s)] for s in back])
    return [TrainerPass(None, logprobs_R, routes, deficits_NL) for logprobs_R in found]


def _logprobs(
    part: Generation, logits: Iterator[tuple[slice, Tensor]], readings: Sequence[Reading]
) -> list[NDArray[Any]]:
    """Compute log-probs [R] of the response tokens by each reading; logits of a large vocabulary never exist whole."""
    sets = part.trace.streams.get(SAMPLING)
    found: list[list[Tensor]] = [[] for _ in readings]
    for rows, logits_RV in logits:
        targets = sampled_tokens(part, rows, logits_RV.device)
        for logprobs, (temperature, on_sets) in zip(found, readings, strict=True):
            if on_sets and sets is not None:
                masks = sets.take(np.flatnonzero(part.sampled_N)[rows] - 1)
                logprobs.append(masked_logprobs_of_logits(logits_RV, targets, masks, temperature=temperature))
            else:
                scaled = logits_RV if temperature == 1 else logits_RV / temperature
                logprobs.append(scaled.gather(-1, targets[:, None])[:, 0] - scaled.logsumexp(-1))
    return [torch.cat(parts).cpu().numpy() for parts in found]


def _without_logprobs(trace: RoutingTrace) -> Generation:
    """Take every token but the first for a response, with log-probs that are not looked at."""
    trace = trace.select(np.flatnonzero(trace.lengths > 1))
    if not len(trace):
        raise BatchMismatchError("the trace has no sequence of two tokens or more, so nothing of it can be replayed")
    ones = np.ones(len(trace), np.int64)
    return Generation(trace, ones, np.zeros(trace.num_rows - len(trace), np.float32))


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


class _InPlace(AdapterUnderTest):
    """Adapter under test that is a user's own model, for the checks that need no other: it is never copied."""

    def __init__(self, routed: hf.RoutedTransformer) -> None:
        self.name = f"foreroute.adapters.hf on {routed.spec.model}"
        self.vocabulary = _vocabulary(routed.model)
        self._routed = routed

    def build(self, case: Case) -> HuggingFaceModel:
        # checks that ask for another shape are not quick, and none of them is run here
        if case != Case():
            raise Unsupported("a model in use is not rebuilt")
        return HuggingFaceModel(self._routed.model)

    def attach(self, model: Any) -> hf.RoutedTransformer:
        return self._routed
