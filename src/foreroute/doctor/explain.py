"""Search for layers and flips that make a gap: first order at both ends, own flips beside earlier ones, exact checks.

Two passes with gradients, one on the trainer's own routes and one on the engine's. What each flip adds to the output of
its layer is computed at both, and one backward each says what that adds to k3. Either end is off by the curvature
between them, with opposite signs, so that their mean is near; the sum over flips is held against the exact one.

Letters: B sequences, T positions, L routers, K picks, F rows with a flip, R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute import core
from foreroute.adapters.hf.response_logprobs import response_log_probs
from foreroute.capture import Generation
from foreroute.core.passes import Rows
from foreroute.doctor.attribution import Attribution, SequenceFlips, WorstToken
from foreroute.doctor.evidence import Evidence
from foreroute.errors import ReplayError
from foreroute.layout.packing import padded_batches
from foreroute.mismatch.attribution import k3_weights
from foreroute.trace import RoutingTrace
from foreroute.trace.operations import same_sets

MOST_SEQUENCES = 8
"""Sequences that are looked into, the worst; never more than a quarter of them."""
CLOSE = 1e-2
"""Share of its output by which a layer that is run alone may be off from itself in the pass, by another kernel."""
SPLIT = 0.1
"""Share of the largest routing part by which a token without a flip of its own may differ where its text stands twice:
bfloat16 differs by the shape of a mask."""
CHECKED = 8
"""Rows of each layer that are run alone on the very routes of the pass."""


def explain(
    model: Any, generation: Generation, evidence: Evidence, *, temperature: float = 1.0, micro_step_tokens: int = 4096
) -> Attribution:
    """Split the routing part of k3 over layers and flips, and look into the sequences with most of k3.

    Args:
        model: whose passes `evidence` is, by `examine` with the same further arguments.
        generation: with the engine's log-probs.
        evidence: with passes without and with replay.
        temperature: that the engine divided its logits by.
        micro_step_tokens: tokens of one forward, with padding; these keep what a backward needs.

    Raises:
        ReplayError: when evidence has no such passes, or the experts of a layer cannot be run by themselves.
    """
    native, roots, engine_R = evidence.native, evidence.replayed, evidence.engine_logprobs_R
    if evidence.has_indexers:
        raise ReplayError("choices of sparse-attention indexers are no routes; such a model cannot be explained")
    if native is None or native.executed is None or roots is None or roots.native is None or engine_R is None:
        raise ReplayError("there is nothing to explain without log-probs of an engine and a pass with replay")
    if not len(engine_R):
        raise ReplayError("there is nothing to explain without a response token")
    run = _Runner(model, generation, native.executed, roots.native, temperature)
    lengths = generation.trace.lengths
    ends = np.cumsum(generation.response_lengths)[:-1]
    engine_S = np.split(np.asarray(engine_R, np.float64), ends)
    flips_S: dict[int, NDArray[np.float64]] = {}
    native_S: dict[int, NDArray[np.float64]] = {}
    replayed_S: dict[int, NDArray[np.float64]] = {}
    for chosen in padded_batches(lengths, micro_step_tokens):
        engine = np.concatenate([engine_S[s] for s in chosen])
        flips, both = run.first_order(chosen, engine)
        flips_S |= dict(zip(chosen.tolist(), flips, strict=True))
        for kept, logprobs in zip((native_S, replayed_S), both, strict=True):
            kept |= dict(zip(chosen.tolist(), logprobs, strict=True))
    order = range(len(generation))
    weights_S = [k3_weights(native_S[s] - engine_S[s]) for s in order]
    k3_S = np.array([(weights_S[s] * (native_S[s] - engine_S[s])).sum() for s in order])
    exact_S = np.array([(weights_S[s] * (native_S[s] - replayed_S[s])).sum() for s in order])
    first_S = np.array([flips_S[s].sum() for s in order])
    worst = np.argsort(-k3_S, kind="stable")[: max(1, min(MOST_SEQUENCES, len(k3_S) // 4))]
    worst = worst[generation.response_lengths[worst] > 0]
    own_S: dict[int, NDArray[np.float64]] = {}
    tokens: list[WorstToken] = []
    for part in padded_batches(lengths[worst], micro_step_tokens):
        chosen = worst[part]
        own_S |= {s: native_S[s] - each for s, each in zip(chosen.tolist(), run.own(chosen), strict=True)}
        routing_S = {s: native_S[s] - replayed_S[s] for s in chosen.tolist()}
        indices = {s: int(np.argmax(np.abs(each))) for s, each in routing_S.items()}
        largest: dict[int, tuple[int, int] | None] = {}
        for s, index in indices.items():
            is_own = abs(own_S[s][index]) >= abs(routing_S[s][index]) / 2
            largest[s] = _largest_flip(flips_S[s], run.position(s, index) - 1, is_own)
        without = run.with_one_flip_less(chosen, list(largest.values()))
        for (s, index), other in zip(indices.items(), without, strict=True):
            flip = largest[s]
            tokens.append(
                WorstToken(
                    sequence=s,
                    position=run.position(s, index),
                    gap=float(native_S[s][index] - engine_S[s][index]),
                    routing=float(routing_S[s][index]),
                    own=float(own_S[s][index]),
                    flip=flip,
                    is_root=flip is not None and bool(run.root_S[s][flip]),
                    of_flip=float(native_S[s][index] - other[index]),
                    num_flips=int(run.flip_S[s][: run.position(s, index)].sum()),
                )
            )
    total, count = sum(map(len, weights_S)), len(generation)
    # a sliding window, or attention that takes no such mask, shows where a token without a flip of its own differs
    apart = max(np.abs(each[~run.has_own_flip(s)]).max(initial=0.0) for s, each in own_S.items())
    part = sum(exact_S[s] for s in own_S)
    is_split = part > 0 and apart <= SPLIT * max(np.abs(native_S[s] - replayed_S[s]).max() for s in own_S)
    own = sum((weights_S[s] * each).sum() for s, each in own_S.items())
    return Attribution(
        carried_L=sum(flips_S[s].sum(0) for s in order) / total,
        began_L=sum((flips_S[s] * run.root_S[s]).sum(0) for s in order) / total,
        k3=float(k3_S.sum() / total),
        routing=float(exact_S.sum() / total),
        error=float(np.abs(first_S - exact_S).sum() / max(np.abs(exact_S).sum(), 1e-300)),
        own_share=float(own / part) if is_split else None,
        worst=tuple(SequenceFlips(int(s), flips_S[int(s)], float(k3_S[s] / (k3_S.sum() or 1.0))) for s in worst),
        tokens=tuple(sorted(tokens, key=lambda token: -abs(token.routing))),
        forwards=run.rows / max(int(lengths.sum()), 1),
        backwards=run.backwards / count,
    )


def _largest_flip(by_flip_TL: NDArray[np.float64], at: int, is_own: bool) -> tuple[int, int] | None:
    """Give position and layer of the flip with the largest amount at one input, or at those before it."""
    first, end = (at, at + 1) if is_own else (0, at)
    cells = np.abs(by_flip_TL[first:end])
    if not cells.any():
        return None
    position, layer = np.unravel_index(int(cells.argmax()), cells.shape)
    return first + int(position), int(layer)


class _Runner:
    """Passes of the trainer on any cells of its own routes and of the engine's, counted.

    Attributes:
        rows: of tokens that were run so far, those of layers alone by their share of layers.
        backwards: sequences that a backward was run over.
        flip_S, root_S: bool [T, L] of each sequence.
    """

    def __init__(
        self, model: Any, generation: Generation, native: RoutingTrace, roots: RoutingTrace, temperature: float
    ) -> None:
        self.model, self.generation = model, generation
        self.routed = core.attach(model)
        self.rows, self.backwards = 0.0, 0
        routers = self.routed.hooks.routers
        if len(routers) != generation.trace.spec.num_layers:
            raise ReplayError("a trace of other layers than the model's routers cannot be explained")
        self._blocks = [self.routed.model.get_submodule(router.path.rpartition(".")[0]) for router in routers]
        self._temperature = temperature
        ids = [each.to_padded().expert_ids_BTLK for each in (native, generation.trace, roots)]
        self._native_BTLK, self._engine_BTLK, roots_BTLK = ids
        flips_BTL, roots_BTL = (  # where both are known
            ~same_sets(each, self._engine_BTLK) & (each[..., 0] >= 0) & (self._engine_BTLK[..., 0] >= 0)
            for each in (self._native_BTLK, roots_BTLK)
        )
        lengths = (generation.trace.lengths - 1).tolist()
        # a response may hold text of tools, which nobody sampled
        parts = np.split(generation.sampled_N, generation.trace.offsets[1:-1])
        self._sampled_S = [np.flatnonzero(part) for part in parts]
        self.flip_S = [flips_BTL[s, :length] for s, length in enumerate(lengths)]
        self.root_S = [roots_BTL[s, :length] for s, length in enumerate(lengths)]

    def position(self, sequence: int, index: int) -> int:
        """Give the position of a sampled token, whose logits are of the one before it."""
        return int(self._sampled_S[sequence][index])

    def has_own_flip(self, sequence: int) -> NDArray[np.bool_]:
        """Bool [R], the sampled tokens of a sequence whose logits are of a position with a flip."""
        return np.asarray(self.flip_S[sequence][self._sampled_S[sequence] - 1].any(-1), np.bool_)

    def first_order(
        self, chosen: NDArray[np.integer], engine_R: NDArray[np.float64]
    ) -> tuple[list[NDArray[np.float64]], list[list[NDArray[np.float64]]]]:
        """Give what each flip adds to the sum of k3, [T, L] of each sequence; and log-probs without and with replay."""
        native_BTLK, engine_BTLK = self._routes(chosen)
        ends = [
            self._end(chosen, own, other) for own, other in ((native_BTLK, engine_BTLK), (engine_BTLK, native_BTLK))
        ]
        logprobs = [each[0].detach().double().cpu().numpy() for each in ends]
        weights_R = torch.from_numpy(k3_weights(logprobs[0] - engine_R)).to(ends[0][0])
        parts: list[Tensor] = []
        for sign, (logprobs_R, outputs, deltas) in zip((-1.0, 1.0), ends, strict=True):
            gradients = torch.autograd.grad((logprobs_R * weights_R).sum(), outputs)
            self.backwards += len(chosen)
            # what the trainer's experts add in the place of the engine's
            parts.append(sign * torch.stack([(g * d).sum(-1) for g, d in zip(gradients, deltas, strict=True)], -1))
        by_flip_BTL = torch.stack(parts).mean(0).double().cpu().numpy()
        lengths = self.generation.trace.lengths[chosen] - 1
        flips = [by_flip_BTL[b, :length] for b, length in enumerate(lengths)]
        return flips, [self._by_sequence(chosen, each[0]) for each in ends]

    def _end(
        self, chosen: NDArray[np.integer], own: Tensor, other: Tensor
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run a pass with gradients: its log-probs, what each layer gives, and what the other routes would add."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            inputs.append((args[0] if args else kwargs["hidden_states"]).detach())
            outputs.append(_states(output))

        with ExitStack() as stack:
            for block in self._blocks:
                stack.callback(block.register_forward_hook(keep, with_kwargs=True).remove)
            # so that layers have gradients, and parameters need none
            embedding = self.model.get_input_embeddings()
            stack.callback(embedding.register_forward_hook(lambda *given: given[-1].detach().requires_grad_()).remove)
            stack.enter_context(torch.enable_grad())
            logprobs_R = self._logprobs(chosen, own)
        same_BTL = torch.from_numpy(same_sets(own.cpu().numpy(), other.cpu().numpy()))
        flips_LF = ~same_BTL.to(own.device).flatten(0, 1).T
        deltas: list[Tensor] = []
        with torch.no_grad():
            for layer, block in enumerate(self._blocks):
                shape = outputs[layer].shape
                delta, at = torch.zeros(shape, dtype=torch.float32, device=outputs[layer].device), flips_LF[layer]
                if at.any():
                    states, ran = (each.reshape(-1, shape[-1])[at] for each in (inputs[layer], outputs[layer]))
                    check = slice(0, CHECKED)
                    alone = self._alone(layer, block, states[check], own.flatten(0, 1)[at][check])
                    if (alone - ran[check]).norm() > CLOSE * ran[check].float().norm():
                        raise ReplayError(
                            f"the layer of {self.routed.hooks.routers[layer].path} gives other outputs where it is run "
                            "alone, so that what a flip adds there is not known"
                        )
                    delta.view(-1, shape[-1])[at] = self._alone(layer, block, states, other.flatten(0, 1)[at]) - ran
                deltas.append(delta)
        return logprobs_R, outputs, deltas

    def _alone(self, layer: int, block: Any, states: Tensor, ids_FLK: Tensor) -> Tensor:
        """Run the experts of one layer on hidden states [F, D]: float32 [F, D]."""
        hooks = self.routed.hooks
        rows = Rows(ids_FLK.transpose(0, 1).to(hooks.id_dtype).contiguous())
        with hooks.routers_running(hooks.open_pass(rows, len(states), states.device)):
            output = _states(block(states[None]))[0].float()
        self.rows += len(states) / len(self._blocks)
        return output

    @torch.no_grad()
    def own(self, chosen: NDArray[np.integer]) -> list[NDArray[np.float64]]:
        """Give log-probs where a token's own flips are the engine's, and those of earlier tokens are the trainer's own.

        The text stands twice in a sequence. A position of the second half sees what lies before it in the first half,
        and itself, so that its own route is chosen apart from that of its context.
        """
        native, engine = self._routes(chosen)
        size, width = native.shape[:2]
        before = torch.ones(width, width, dtype=torch.bool, device=native.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=native.device)
        sees = torch.cat([torch.cat([before, torch.zeros_like(before)], 1), torch.cat([before & ~itself, itself], 1)])
        dtype = next(self.model.parameters()).dtype
        mask = torch.zeros(size, 1, *sees.shape, dtype=dtype, device=native.device)
        mask = mask.masked_fill(~sees, torch.finfo(dtype).min)
        positions = torch.arange(width, device=native.device).repeat(size, 2)

        def twice(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            ids = kwargs["input_ids"].repeat(1, 2)
            return args, {**kwargs, "input_ids": ids, "attention_mask": mask, "position_ids": positions}

        def second_half(_: Any, __: Any, output: Any) -> Any:
            return replace(output, last_hidden_state=output.last_hidden_state[:, width:])

        with ExitStack() as stack:
            stack.callback(self.model.register_forward_pre_hook(twice, with_kwargs=True).remove)
            stack.callback(self.model.base_model.register_forward_hook(second_half).remove)
            self.rows += int(self.generation.trace.lengths[chosen].sum())
            return self._by_sequence(chosen, self._logprobs(chosen, torch.cat([native, engine], 1)))

    @torch.no_grad()
    def with_one_flip_less(
        self, chosen: NDArray[np.integer], flips: Sequence[tuple[int, int] | None]
    ) -> list[NDArray[np.float64]]:
        """Give log-probs on the trainer's own routes, but for one decision of each sequence, which is the engine's."""
        native, engine = self._routes(chosen)
        routes = native.clone()
        for b, flip in enumerate(flips):
            if flip is not None:
                routes[b, flip[0], flip[1]] = engine[b, flip[0], flip[1]]
        return self._by_sequence(chosen, self._logprobs(chosen, routes))

    def _routes(self, chosen: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Give routes [B, T, L, K] of both sides, of all that is put into the model: not of last tokens."""
        width = int(self.generation.trace.lengths[chosen].max()) - 1
        native, engine = (
            torch.from_numpy(each[chosen, :width]).to(self.model.device)
            for each in (self._native_BTLK, self._engine_BTLK)
        )
        return native, torch.where(engine < 0, native, engine)

    def _logprobs(self, chosen: NDArray[np.integer], routes: Tensor) -> Tensor:
        """Run sequences on routes: log-probs [R] of their response tokens."""
        self.rows += int(self.generation.trace.lengths[chosen].sum())
        with self.routed.replay(routes):
            return response_log_probs(self.model, self.generation.select(chosen), self._temperature)[0]

    def _by_sequence(self, chosen: NDArray[np.integer], logprobs_R: Tensor) -> list[NDArray[np.float64]]:
        splits = np.cumsum(self.generation.response_lengths[chosen])[:-1]
        return np.split(logprobs_R.detach().double().cpu().numpy(), splits)


def _states(output: Any) -> Tensor:
    """Give the hidden states that a layer of experts returned, with or without its scores."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states
