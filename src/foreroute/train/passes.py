"""Passes of the policy over a rollout: the micro-steps that they take, who executes them, and what a forward computes.

Stage 2, recompute, is such a pass: log-probs of the rollout under the policy that starts the step, before the update.
Stage 3 and the reference run the same forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from foreroute.adapters.hf import RoutedTransformer
from foreroute.capture import Generation
from foreroute.layout import padded_batches
from foreroute.replay import masked_entropy_of_logits, masked_logprobs_of_logits, to_device
from foreroute.trace import SAMPLING, DecisionStream, RoutingTrace, concatenate
from foreroute.trace.checks import as_offsets, join_ranges
from foreroute.train.config import RLConfig
from foreroute.train.optimizer import load_state
from foreroute.train.ranks import Ranks
from foreroute.train.rollout import Experience

ValueT = TypeVar("ValueT", bound=np.generic)


@dataclass(frozen=True, eq=False)
class Stage:
    """Micro-steps that run on the same weights.

    Attributes:
        name: "recompute", or "update 0" and so on for the mini-batches of the update.
        after: how many optimizer steps of this rollout come before it.
        micro_steps: the sequences of each, int64.
    """

    name: str
    after: int
    micro_steps: list[NDArray[np.int64]]

    @property
    def order_S(self) -> NDArray[np.int64]:
        """int64 [S], sequence numbers in the order of execution."""
        return np.concatenate(self.micro_steps)

    def in_order(self, parts: Sequence[NDArray[ValueT]], lengths_S: NDArray[np.int64]) -> NDArray[ValueT]:
        """Put rows of all micro-steps, which take all sequences, in the order of these; each has `lengths_S` rows."""
        sequences, joined = self.order_S, np.concatenate(parts)
        ordered = np.empty_like(joined)
        # row r of the joined parts belongs to a sequence that starts at that sequence's offset in the result
        ordered[join_ranges(as_offsets(lengths_S)[sequences], lengths_S[sequences])] = joined
        return ordered


@dataclass(frozen=True, eq=False)
class Schedule:
    """The micro-steps of one rank in one step. Sequences of like lengths share one, so that little is padded.

    Attributes:
        recompute: all sequences.
        update: for each mini-batch, the informative sequences that it trains on. A rank that has too few for as many
            micro-steps as another takes some of no advantage beside them, which add nothing to the gradient.
    """

    recompute: Stage
    update: list[Stage]


def make_schedule(experience: Experience, config: RLConfig, ranks: Ranks, *, seed: tuple[int, int]) -> Schedule:
    """Assign the sequences of this rank to micro-steps, in an order that follows from the seed. A collective call.

    All ranks have equally many sequences, and take the same number of micro-steps.
    """
    # the last token of a sequence is not put into the model
    lengths_S = experience.generation.trace.lengths - 1

    def packed(sequences: NDArray[np.int64], fewest: int = 0) -> list[NDArray[np.int64]]:
        longest_first = np.argsort(-lengths_S[sequences], kind="stable")
        batches = padded_batches(lengths_S[sequences[longest_first]], config.micro_step_tokens, min_count=fewest)
        # within a micro-step they keep the order that they were given in
        return [sequences[np.sort(longest_first[batch])] for batch in batches]

    everything = np.arange(len(lengths_S))
    order = np.random.default_rng([*seed, 2]).permutation(np.flatnonzero(experience.informative_S))
    spare = np.flatnonzero(~experience.informative_S)
    parts = np.array_split(order, config.mini_steps)
    # every rank takes part in the collectives of every micro-step, so all need as many as the rank with the most
    num_recompute, *num_update = ranks.max([len(packed(part)) for part in [everything, *parts]]).tolist()
    update: list[Stage] = []
    for part, count in zip(parts, num_update, strict=True):
        # a micro-step holds one sequence at least
        missing = max(0, count - len(part))
        taken, spare = np.concatenate([part, spare[:missing]]), spare[missing:]
        if count:
            update.append(Stage(f"update {len(update)}", len(update), packed(taken, count)))
    return Schedule(Stage("recompute", 0, packed(everything, num_recompute)), update)


@dataclass(frozen=True, eq=False)
class Recomputed:
    """One pass of the trainer over a rollout, without gradients.

    Attributes:
        logprobs_R: float32 [R], of the response tokens, sequence after sequence.
        entropy_R: float32 [R], in nats.
        executed: the routes that this pass took, and the choices of indexers where they were asked for; last tokens
            have none.
        margins_NL: float32 [N - S, L], top-k margins of its routers; last tokens are not put into the model.
    """

    logprobs_R: NDArray[np.float32]
    entropy_R: NDArray[np.float32]
    executed: RoutingTrace
    margins_NL: NDArray[np.float32]


def recompute(
    routed: RoutedTransformer,
    execution: PolicyExecution,
    generation: Generation,
    stage: Stage,
    *,
    temperature: float,
    replay: bool,
    weight_version: int,
    accepted: Collection[int] | None = None,
    gate_weights: bool = False,
    indexers: bool = False,
) -> Recomputed:
    """Run the policy over the rollout, on its own routes or on the rollout's.

    Args:
        routed: the policy.
        execution: how it is executed.
        generation: S sequences.
        stage: takes all of them.
        temperature: of the rollout.
        replay: force the routes of `generation.trace` and its choices of indexers, and with `gate_weights` its gate
            weights too.
        weight_version: the version of the policy's weights.
        accepted: the versions that replayed routes may be of; that of the policy alone by default.
        gate_weights: see there.
        indexers: record choices of indexers beside the routes that this pass takes.
    """
    logprobs, entropies, executed, margins = [], [], [], []
    versions = weight_version if accepted is None else accepted
    with torch.no_grad(), execution.running(stage) if replay else nullcontext():
        for number, sequences in enumerate(stage.micro_steps):
            part = generation.select(sequences)
            routes = inputs(part.trace)
            forced: AbstractContextManager[Any] = (
                routed.replay(routes, weight_version=versions, gate_weights=gate_weights) if replay else nullcontext()
            )
            recorded = routed.record(weight_version=weight_version, margins=True, indexers=indexers)
            with forced, execution.micro_step(number, routes), recorded as recording:
                logprobs_R, entropy_R = response_logprobs(routed.model, part, temperature)
            logprobs.append(logprobs_R.cpu().numpy())
            entropies.append(entropy_R.cpu().numpy())
            executed.append(recording.rollout([part.trace.tokens(s) for s in range(len(part))]))
            margins.append(recording.margins_NL())
    responses_S, routed_S = generation.response_lengths, generation.trace.lengths - 1
    return Recomputed(
        stage.in_order(logprobs, responses_S),
        stage.in_order(entropies, responses_S),
        concatenate(executed).select(np.argsort(stage.order_S)),
        stage.in_order(margins, routed_S),
    )


def response_logprobs(model: Any, generation: Generation, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each sampled token, and the entropy of the distribution it was sampled from.

    Both are on the recorded sets where top-p, top-k or min-p left tokens out.

    Returns:
        Two tensors [R] in float32, or in the logits' dtype where that is wider: response tokens packed sequence after
        sequence. Entropy is in nats, without gradient.
    """
    logits_RV, targets_R = _response_logits(model, generation)
    if (masks := _masks(generation)) is not None:
        logprobs_R = masked_logprobs_of_logits(logits_RV, targets_R, masks, temperature=temperature)
        return logprobs_R, masked_entropy_of_logits(logits_RV.detach(), targets_R, masks, temperature=temperature)
    logprobs_RV = _scaled(logits_RV, temperature).log_softmax(-1)
    entropy_R = -(logprobs_RV.detach().exp() * logprobs_RV.detach()).sum(-1)
    return logprobs_RV.gather(-1, targets_R[:, None])[:, 0], entropy_R


def sampled_logprobs(model: Any, generation: Generation, temperature: float) -> Tensor:
    """Compute the log-probabilities of `response_logprobs`, to the bit, without the passes over logits for entropy."""
    logits_RV, targets_R = _response_logits(model, generation)
    if (masks := _masks(generation)) is not None:
        return masked_logprobs_of_logits(logits_RV, targets_R, masks, temperature=temperature)
    return -cross_entropy(_scaled(logits_RV, temperature), targets_R, reduction="none")


def _masks(generation: Generation) -> DecisionStream | None:
    """The sets that the R sampled tokens were drawn from, where some tokens were left out."""
    masks = generation.trace.streams.get(SAMPLING)
    return None if masks is None else masks.take(np.flatnonzero(generation.sampled_N) - 1)


def _scaled(logits_RV: Tensor, temperature: float) -> Tensor:
    return logits_RV if temperature == 1 else logits_RV / temperature


def _response_logits(model: Any, generation: Generation) -> tuple[Tensor, Tensor]:
    """Compute logits [R, V], and find the tokens [R] that were sampled there."""
    input_ids_BT, mask_BT = pad(inputs(generation.trace))
    # the logits at position p are those of token p + 1
    predicts_BT = mask_BT.astype(bool)
    predicts_BT[predicts_BT] = generation.targets_N
    device = model.device
    picked_R = to_device(np.flatnonzero(predicts_BT), device)
    with _head_on(model, picked_R):
        logits = model(
            input_ids=to_device(input_ids_BT, device), attention_mask=to_device(mask_BT, device), use_cache=False
        ).logits
    # a family whose head is a function and no module has computed all of them
    logits_RV = logits if logits.ndim == 2 else _picked(logits, picked_R)
    logits_RV = logits_RV.to(torch.promote_types(logits.dtype, torch.float32))
    responses = [generation.response(s) for s in range(len(generation))]
    targets_R = to_device(np.concatenate(responses).astype(np.int64), device)
    return logits_RV, targets_R


@contextmanager
def _head_on(model: Any, picked_R: Tensor) -> Iterator[None]:
    """While the context is open, the output head sees the picked positions alone, as rows [R, hidden]."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return

    def pick(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_picked(args[0], picked_R), *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def _picked(values_BTX: Tensor, picked_R: Tensor) -> Tensor:
    """Select [R, X] by positions: how many rows a mask picks would be known on the device alone."""
    return values_BTX.flatten(0, 1).index_select(0, picked_R)


def inputs(trace: RoutingTrace) -> RoutingTrace:
    """Give what is put into the model: all but the last token of each sequence, whose logits nobody asks for.

    The engine never routed that token either, so every row that is left can be replayed, and counted ahead.
    """
    return trace.truncated(trace.lengths - 1)


def pad(trace: RoutingTrace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pad tokens and mask, int64 [B, T], on the right, where the mask hides whatever token there is."""
    mask_BT = np.arange(int(trace.lengths.max())) < trace.lengths[:, None]
    input_ids_BT = np.zeros(mask_BT.shape, np.int64)
    input_ids_BT[mask_BT] = trace.token_ids_N
    return input_ids_BT, mask_BT.astype(np.int64)


class PolicyExecution:
    """Runs the forwards and backwards of a policy: here in one process, where there is nothing to plan.

    `expert_parallel.py` has the one of several ranks, on which all of them make the same calls.

    Attributes:
        ranks: of the run.
    """

    def __init__(self, policy: RoutedTransformer) -> None:
        self.ranks = Ranks()
        self._policy = policy

    def state_dict(self) -> Mapping[str, Tensor]:
        """Give the weights of the whole policy."""
        return self._policy.model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Give the state dict of the optimizer as one process with the whole policy would have it."""
        return optimizer.state_dict()

    def load(self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Take up the weights and the optimizer state of a whole policy."""
        self._policy.model.load_state_dict(weights)
        load_state(optimizer, state)

    def home_LE(self) -> NDArray[np.int16] | None:
        """Give the rank that every expert lives on, int16 [L, E], where that changes in a run."""
        return None

    def move_homes(self, home_LE: NDArray[np.int16], optimizer: torch.optim.Optimizer) -> None:
        """Move experts to where they lived when a checkpoint was saved, if these ranks can."""

    def plan(self, first: int, routes: RoutingTrace, stages: Sequence[Stage], optimizer: torch.optim.Optimizer) -> None:
        """Announce stages, in their order, and the routes to replay; `first` optimizer steps come before them.

        Experts may move to other homes for them, with what the optimizer keeps of them.
        """

    def running(self, stage: Stage, *, updating: bool = False) -> AbstractContextManager[None]:
        """Run the micro-steps of a stage that replays routes, by its plan if it was announced."""
        return nullcontext()

    def micro_step(self, number: int, routes: RoutingTrace) -> AbstractContextManager[None]:
        """Run one forward and its backward on rows that `routes` are replayed on."""
        return nullcontext()

    def finish_gradients(self, max_norm: float) -> float:
        """Add up and clip the gradients of all ranks. Returns their norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(self._policy.model.parameters(), max_norm).item()

    def weights_changed(self) -> None:
        """Note that the optimizer has stepped: replicas of earlier weights are of no use."""

    def record(self) -> dict[str, Any]:
        """Give what is to be recorded about the step's execution; empty on all ranks but the first."""
        return {}

    def close(self) -> None:
        """Give back the memory and threads that are held for it."""
