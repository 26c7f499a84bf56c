"""Evidence from a model and a generation: its wiring, and what it computes. The torch side of the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.adapters import hf
from foreroute.capture import Generation
from foreroute.conformance import ALL_CHECKS, AdapterUnderTest, Case, Unsupported, run_conformance
from foreroute.conformance.huggingface import HuggingFaceModel
from foreroute.doctor.evidence import Evidence, Rescored, TrainerPass
from foreroute.errors import AttachError, BatchMismatchError, TraceError
from foreroute.layout import padded_batches
from foreroute.mismatch import misplaced_masks, token_mismatch
from foreroute.replay import masked_logprobs_of_logits, overridden
from foreroute.trace import INDEXER, SAMPLING, RoutingTrace, concatenate

QUICK = tuple(check.id for check in ALL_CHECKS if check.quick)
FAR = 1e-2
"""k3, in nats, from which log-probs are taken otherwise too, to find out how the engine took its own."""
TEMPERATURES = tuple(tenths / 10 for tenths in range(1, 21))
"""Those that people set."""
LOGITS_BYTES = 1 << 26
"""Most bytes of float32 logits at a time: 447 rows of a vocabulary of 150,000."""


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
        micro_step_tokens: token slots of one forward; as many as the longest sequence has, where that is more.
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
    given["has_indexers"] = routed.indexers is not None
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
    if wrong := misplaced_masks(trace):
        given |= {"mask_error": wrong, "engine_logprobs_R": None}
    if given["engine_logprobs_R"] is None:
        # nothing is compared with log-probs on the masks, and of routes alone nobody says which tokens were sampled
        sequences = replace(sequences, trace=trace.without_streams(SAMPLING))
    together = padded_batches(trace.lengths, int(trace.lengths.max(initial=budget)))
    alone = [np.array([s]) for s in range(len(trace))]
    native = _run(routed, sequences, together, temperature)
    repeated = _run(routed, sequences, together, temperature)
    repacked = _run(routed, sequences, alone, temperature)
    given |= {"engine": trace, "native": native, "repeated": repeated, "repacked": repacked}
    try:
        replayed = _run(routed, sequences, together, temperature, replay=True)
    except TraceError as error:
        return Evidence(replay_error=str(error), **given)
    engine = given["engine_logprobs_R"]
    if engine is not None and replayed.logprobs_R is not None and token_mismatch(replayed.logprobs_R, engine).k3 > FAR:
        given["rescored"] = _rescored(routed, sequences, together)
    return Evidence(replayed=replayed, **given)


@torch.no_grad()
def _run(
    routed: hf.RoutedTransformer,
    sequences: Generation,
    batches: Sequence[NDArray[np.int64]],
    temperature: float,
    *,
    replay: bool = False,
) -> TrainerPass:
    """One pass over all sequences; results are in the order of the sequences."""
    readings = [(temperature, SAMPLING in sequences.trace.streams)]
    logprobs, executed, order = [], [], []
    for chosen in batches:
        part = sequences.select(chosen)
        forced: AbstractContextManager[Any] = routed.replay(part.trace) if replay else nullcontext()
        choices = routed.indexers is not None and INDEXER in part.trace.streams
        with forced, routed.record(indexers=choices) as recording:
            trunk = _run_trunk(routed.model, part)
        logprobs += _response_logprobs(routed.model, trunk, part, readings)[0]
        executed.append(recording.trace())
        order.append(chosen)
    back = np.argsort(np.concatenate(order))
    return TrainerPass(concatenate(executed).select(back), np.concatenate([logprobs[int(s)] for s in back]))


@torch.no_grad()
def _rescored(
    routed: hf.RoutedTransformer, sequences: Generation, batches: Sequence[NDArray[np.int64]]
) -> tuple[Rescored, ...]:
    """Log-probs on the engine's routes at other temperatures, on its masks and over all tokens."""
    readings = [(t, on_sets) for on_sets in sorted({False, SAMPLING in sequences.trace.streams}) for t in TEMPERATURES]
    back = np.argsort(np.concatenate(batches))
    found: list[list[NDArray[np.float32]]] = [[] for _ in readings]
    for chosen in batches:
        part = sequences.select(chosen)
        with routed.replay(part.trace):
            trunk = _run_trunk(routed.model, part)
        for parts, more in zip(found, _response_logprobs(routed.model, trunk, part, readings), strict=True):
            parts += more
    joined = [np.concatenate([parts[int(s)] for s in back]) for parts in found]
    return tuple(Rescored(t, on_sets, logprobs) for (t, on_sets), logprobs in zip(readings, joined, strict=True))


def _run_trunk(model: Any, part: Generation) -> Any:
    """Run a model over a batch padded on the right; what its trunk, the model below the head, gives the head.

    The head itself sees one position: logits of all positions and tokens would be far larger than the model.
    """
    lengths = part.trace.lengths
    kept = np.arange(int(lengths.max())) < lengths[:, None]
    tokens = np.zeros(kept.shape, np.int64)
    tokens[kept] = part.trace.token_ids_N
    device = next(model.parameters()).device
    given: list[Any] = []

    def keep(trunk: nn.Module, args: Any, outputs: Any) -> Any:
        given.append(outputs)
        return replace(outputs, last_hidden_state=outputs.last_hidden_state[:, :1])

    handle = model.base_model.register_forward_hook(keep)
    try:
        mask = torch.from_numpy(kept.astype(np.int64)).to(device)
        model(input_ids=torch.from_numpy(tokens).to(device), attention_mask=mask, use_cache=False)
    finally:
        handle.remove()
    (outputs,) = given
    predicts = kept[:, :-1] & kept[:, 1:]
    predicts[predicts] = part.targets_N
    picked = torch.from_numpy(np.flatnonzero(predicts)).to(device)
    hidden_RH = outputs.last_hidden_state[:, :-1].flatten(0, 1).index_select(0, picked)
    return replace(outputs, last_hidden_state=hidden_RH)


def _response_logprobs(
    model: Any, trunk: Any, part: Generation, readings: Sequence[tuple[float, bool]]
) -> list[list[NDArray[np.float32]]]:
    """Log-probs of the response tokens: for each reading, a temperature and whether on sets, one array per sequence.

    The model's own forward is put on a few rows at a time, since a family may scale or cap what its head gives.
    """
    targets_R = torch.from_numpy(part.trace.token_ids_N[part.sampled_N].astype(np.int64))
    sets = part.trace.streams.get(SAMPLING)
    found: list[list[Tensor]] = [[] for _ in readings]
    step = max(1, LOGITS_BYTES // (4 * _vocabulary(model)))
    for first in range(0, max(len(targets_R), 1), step):
        rows = slice(first, first + step)
        outputs = replace(trunk, last_hidden_state=trunk.last_hidden_state[None, rows])
        targets = targets_R[rows].to(outputs.last_hidden_state.device)
        with overridden(model.base_model, "forward", lambda _, *args, outputs=outputs, **kwargs: outputs):
            logits_RV = model(input_ids=targets[None], use_cache=False).logits[0].float()
        for logprobs, (temperature, on_sets) in zip(found, readings, strict=True):
            if on_sets and sets is not None:
                masks = sets.take(np.flatnonzero(part.sampled_N)[rows] - 1)
                logprobs.append(masked_logprobs_of_logits(logits_RV, targets, masks, temperature=temperature))
            else:
                scaled = logits_RV if temperature == 1 else logits_RV / temperature
                logprobs.append(scaled.gather(-1, targets[:, None])[:, 0] - scaled.logsumexp(-1))
    ends = np.cumsum(part.response_lengths)[:-1]
    return [np.split(torch.cat(parts).cpu().numpy(), ends) for parts in found]


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
