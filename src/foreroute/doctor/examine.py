"""Evidence from a model and a generation: its wiring, and what it computes. The torch side of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters import hf
from foreroute.capture import Generation
from foreroute.conformance import ALL_CHECKS, AdapterUnderTest, Case, Unsupported, run_conformance
from foreroute.conformance.huggingface import HuggingFaceModel
from foreroute.doctor.evidence import Evidence, TrainerPass
from foreroute.errors import AttachError, BatchMismatchError, TraceError
from foreroute.layout import by_token_budget
from foreroute.replay import masked_logprobs_of_logits
from foreroute.trace import SAMPLING, RoutingTrace, concatenate

QUICK = tuple(check.id for check in ALL_CHECKS if check.quick)


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
        micro_step_tokens: token slots of one forward.
        expected_version: the weight version that the trainer is at.
        random_weights: recorded in the evidence.

    Raises:
        BatchMismatchError: when no sequence of the trace has two tokens.
    """
    model.eval()
    given: dict[str, Any] = {"expected_version": expected_version, "random_weights": random_weights}
    try:
        routed = hf.attach(model)
    except AttachError as error:
        return Evidence(attach_error=str(error), **given)
    given["conformance"] = run_conformance(_InPlace(routed), only=QUICK)
    sequences = generation or (None if trace is None else _without_logprobs(trace))
    if sequences is None:
        return Evidence(**given)
    given["engine_logprobs_R"] = None if generation is None else generation.logprobs_R
    return _passes(routed, sequences, temperature, micro_step_tokens, given)


def _passes(
    routed: hf.RoutedTransformer, sequences: Generation, temperature: float, budget: int, given: dict[str, Any]
) -> Evidence:
    trace = sequences.trace
    try:
        routed.spec.require_same(trace.spec, what="the trace")
    except TraceError as error:
        return Evidence(replay_error=str(error), **given)
    vocabulary = _vocabulary(routed.model)
    if trace.num_rows and int(trace.token_ids_N.max()) >= vocabulary:
        error_text = f"it holds token {int(trace.token_ids_N.max())}, the model's vocabulary has {vocabulary}"
        return Evidence(replay_error=error_text, **given)
    together = list(by_token_budget(trace.lengths, budget, padded=True))
    alone = [np.array([s]) for s in range(len(trace))]
    native = _run(routed, sequences, together, temperature)
    repeated = _run(routed, sequences, together, temperature)
    repacked = _run(routed, sequences, alone, temperature)
    given |= {"engine": trace, "native": native, "repeated": repeated, "repacked": repacked}
    try:
        return Evidence(replayed=_run(routed, sequences, together, temperature, replay=True), **given)
    except TraceError as error:
        return Evidence(replay_error=str(error), **given)


@torch.no_grad()
def _run(
    routed: hf.RoutedTransformer,
    sequences: Generation,
    batches: Iterable[NDArray[np.int64]],
    temperature: float,
    *,
    replay: bool = False,
) -> TrainerPass:
    """One pass over all sequences; results are in the order of the sequences."""
    logprobs, executed, order = [], [], []
    for chosen in batches:
        part = sequences.select(chosen)
        forced: AbstractContextManager[Any] = routed.replay(part.trace) if replay else nullcontext()
        with forced, routed.record() as recording:
            logprobs += _response_logprobs(routed.model, part, temperature)
        executed.append(recording.trace())
        order.append(chosen)
    back = np.argsort(np.concatenate(order))
    return TrainerPass(concatenate(executed).select(back), np.concatenate([logprobs[int(s)] for s in back]))


def _response_logprobs(model: Any, part: Generation, temperature: float) -> list[NDArray[np.float32]]:
    """One array of response log-probs per sequence, from a batch padded on the right."""
    lengths = part.trace.lengths
    kept = np.arange(int(lengths.max())) < lengths[:, None]
    tokens = np.zeros(kept.shape, np.int64)
    tokens[kept] = part.trace.token_ids_N
    device = next(model.parameters()).device
    input_ids = torch.from_numpy(tokens).to(device)
    mask = torch.from_numpy(kept.astype(np.int64)).to(device)
    logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    rows = np.flatnonzero(part.targets_N)
    logits_RV = logits[mask[:, 1:].bool()].index_select(0, torch.from_numpy(rows).to(device)).float()
    targets_R = torch.from_numpy(part.trace.token_ids_N[part.sampled_N].astype(np.int64)).to(device)
    if (masks := part.trace.streams.get(SAMPLING)) is not None:
        of_tokens = masks.take(np.flatnonzero(part.sampled_N) - 1)
        logprobs_R = masked_logprobs_of_logits(logits_RV, targets_R, of_tokens, temperature=temperature)
    else:
        logprobs_R = (logits_RV / temperature).log_softmax(-1).gather(-1, targets_R[:, None])[:, 0]
    return np.split(logprobs_R.cpu().numpy(), np.cumsum(part.response_lengths)[:-1])


def _without_logprobs(trace: RoutingTrace) -> Generation:
    """Every token but the first as a response, with log-probs that are not looked at."""
    trace = trace.select(np.flatnonzero(trace.lengths > 1))
    if not len(trace):
        raise BatchMismatchError("the trace has no sequence of two tokens or more, so nothing of it can be replayed")
    ones = np.ones(len(trace), np.int64)
    return Generation(trace, ones, np.zeros(trace.num_rows - len(trace), np.float32))


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


class _InPlace(AdapterUnderTest):
    """A user's own model, for the checks that need no other: it is never copied."""

    def __init__(self, routed: hf.RoutedTransformer) -> None:
        self.name = f"foreroute.adapters.hf on {routed.spec.model}"
        self.vocabulary = _vocabulary(routed.model)
        self._routed = routed

    def build(self, case: Case) -> HuggingFaceModel:
        if case != Case():
            raise Unsupported("a model in use is not rebuilt")
        return HuggingFaceModel(self._routed.model)

    def attach(self, model: Any) -> hf.RoutedTransformer:
        return self._routed
