"""Which of TRL's passes is which, and what is replayed in it.

A training step of TRL is, in this order: the rollout; the old-log-prob pass, in which the weights are still those of the
rollout (left out where each generation serves one update); the reference pass; rewards; then shuffling and splitting
into micro-batches, and one update pass for each. Sequences carry a number through all that, in a tensor of the batch
beside TRL's own; the routes stay here, in one trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters import hf
from foreroute.adapters.sampled import facts_of
from foreroute.adapters.trl.generate_tap import GenerateTap
from foreroute.adapters.trl.metrics import MismatchSums
from foreroute.adapters.trl.reference import is_reference
from foreroute.adapters.trl.rollout import FunctionTap, Rollout, Tap, require_version
from foreroute.adapters.trl.vllm_tap import VLLMTap
from foreroute.errors import ConfigError, ReplayError
from foreroute.mismatch import routing_mismatch, token_mismatch
from foreroute.trace import RoutingTrace, concatenate

Replay = Literal["none", "R2", "R3"]

ROWS = "foreroute_rows"
"""In TRL's batches: int64 [B, 2], the number of the rollout and that of the sequence in it."""


@dataclass(eq=False)
class Stage:
    """The policy's log-probs that TRL is about to compute.

    Attributes:
        kind: the old-log-prob pass of a rollout, or an update.
        sequences: int64 [B], their numbers in the rollout.
        recorded: what the parts of the pass executed, where that is kept.
        logprobs_BR: of an update, once it has run.
        ran: whether it did.
    """

    kind: Literal["old", "update"]
    sequences: NDArray[np.int64]
    recorded: list[RoutingTrace]
    logprobs_BR: Tensor | None = None
    ran: bool = False


class TrainerPasses:
    """The passes of one trainer.

    Args:
        trainer: TRL's, set up.
        replay: what to replay.

    Attributes:
        metrics: mismatch that is not logged yet.
    """

    def __init__(self, trainer: Any, replay: Replay) -> None:
        self.metrics = MismatchSums()
        self._trainer = trainer
        self._replay = replay
        self._policy = trainer.accelerator.unwrap_model(trainer.model)
        self._is_reference = is_reference(self._policy)
        self._routed = hf.attach(self._policy)
        self._tap = self._make_tap()
        self._rollout: Rollout | None = None
        self._number = 0
        self._stage: Stage | None = None
        self._has_old_pass = False
        self._updates = 0

    def _make_tap(self) -> Tap:
        trainer, facts = self._trainer, facts_of(self._routed)
        if trainer.rollout_func is not None:
            trainer.rollout_func = FunctionTap(trainer.rollout_func, facts)
            return trainer.rollout_func  # type: ignore[no-any-return]
        if trainer.use_vllm and self._replay != "R2":
            return VLLMTap(trainer.vllm_generation, trainer.accelerator, facts)
        return GenerateTap(self._routed, trainer.temperature)

    def capture(self, generate: Callable[[], Any]) -> Any:
        """TRL's `_generate`, watched."""
        if self._replay == "R2":
            return generate()
        with self._tap.listening():
            result = generate()
        prompts, completions = result[0], result[1]
        version = int(self._trainer.state.global_step)
        trace, logprobs = self._tap.captured(prompts, completions, version)
        self._routed.spec.require_same(trace.spec, what="the rollout's trace")
        require_version(trace, version)
        self._number += 1
        self._rollout = Rollout(self._number, trace, np.array([len(p) for p in prompts]), logprobs)
        self._stage = Stage("old", np.arange(len(trace)), [])
        return result

    def generate(self, generate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """TRL's `_generate_and_score_completions`, whose old-log-prob pass is replayed, or recorded for R2."""
        self._rollout, self._stage = None, None
        if self._replay == "R2":
            self._stage = Stage("old", np.zeros(0, np.int64), [])
        try:
            output = generate()
        finally:
            stage, self._stage = self._stage, None
        assert stage is not None, "capture() or R2 has set it"
        if self._replay == "R2":
            self._rollout = self._recorded_rollout(stage, output)
        rollout = self._current()
        self._has_old_pass = output.get("old_per_token_logps") is not None
        if self._has_old_pass and not stage.ran:
            raise ReplayError(
                "TRL computed old log-probs by another way than _get_per_token_logps_and_entropies, so that nothing was "
                "replayed in them"
            )
        sampled = _sampled_logprobs(rollout, output)
        self._rollout = rollout = Rollout(rollout.number, rollout.trace, rollout.prompt_lengths, sampled)
        if self._has_old_pass:
            self._measure(stage, output["old_per_token_logps"], output)
        numbers = torch.tensor([[rollout.number, s] for s in range(len(rollout.trace))])
        output[ROWS] = numbers.to(output["completion_ids"].device)
        return output

    def update(self, compute: Callable[[], Any], inputs: dict[str, Any]) -> Any:
        """TRL's `_compute_loss` on a micro-batch."""
        rollout = self._current()
        rows = inputs.get(ROWS)
        if rows is None:
            raise ReplayError(f"the micro-batch has no {ROWS!r}: TRL dropped what its generation batch held")
        numbers_B2 = rows.cpu().numpy()
        if (numbers_B2[:, 0] != rollout.number).any():
            raise ReplayError(
                f"the micro-batch is of rollouts {sorted(set(numbers_B2[:, 0].tolist()))}, and the routes kept are those "
                f"of rollout {rollout.number}"
            )
        self._stage = stage = Stage("update", numbers_B2[:, 1], [])
        try:
            loss = compute()
        finally:
            self._stage = None
        if not stage.ran or stage.logprobs_BR is None:
            raise ReplayError(
                f"{type(self._trainer).__name__} computed a loss without _get_per_token_logps_and_entropies, so that "
                "nothing was replayed in it"
            )
        if not self._has_old_pass:
            self._measure(stage, stage.logprobs_BR, inputs)
        self._updates += 1
        return loss

    def step(self, run: Callable[[], Any]) -> Any:
        """TRL's `training_step`. Raises `ReplayError` when no update pass went through `update`."""
        before = self._updates
        result = run()
        if self._updates == before:
            raise ReplayError(
                f"{type(self._trainer).__name__} made a training step without _compute_loss, so that nothing was "
                "replayed in it"
            )
        self.metrics.share(self._trainer.accelerator)
        return result

    def log_probs(
        self,
        compute: Callable[..., Any],
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *,
        batch_size: int | None,
        options: dict[str, Any],
    ) -> Any:
        """TRL's `_get_per_token_logps_and_entropies`, in parts of `batch_size`, as TRL does, each with its own routes."""
        stage = self._stage
        if stage is None or not self._is_policy(model):
            return compute(input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)
        pictures = sorted(name for name, value in options.items() if isinstance(value, Tensor | list))
        if pictures:
            raise ConfigError(f"the batch holds {', '.join(pictures)}: images are not supported with routing replay")
        parts = []
        each = batch_size or len(input_ids)
        for first in range(0, len(input_ids), each):
            rows = slice(first, first + each)
            with self._routing(stage, rows, attention_mask[rows]):
                parts.append(compute(input_ids[rows], attention_mask[rows], logits_to_keep, **options))
        stage.ran = True
        result = joined(parts)
        if stage.kind == "update":
            stage.logprobs_BR = result[0].detach()
        return result

    def _is_policy(self, model: Any) -> bool:
        return self._trainer.accelerator.unwrap_model(model) is self._policy and not self._is_reference()

    @contextmanager
    def _routing(self, stage: Stage, rows: slice, mask_BT: Tensor) -> Iterator[None]:
        """Replay what belongs to a part of a pass, and keep what it executed where that is of use."""
        records = self._records(stage)
        replays = self._replay == "R3" or (self._replay == "R2" and stage.kind == "update")
        session = recording = None
        with ExitStack() as stack:
            if replays:
                trace = self._trace_of(stage.sequences[rows], mask_BT)
                session = stack.enter_context(self._routed.replay(trace, telemetry=stage.kind == "update"))
            if records:
                recording = stack.enter_context(self._routed.record())
            yield
        if recording is not None:
            stage.recorded.append(recording.trace())
        if session is not None and stage.kind == "update":
            self.metrics.add_native(session.agreement().routing)

    def _records(self, stage: Stage) -> bool:
        """The first pass over a rollout, whose weights are the rollout's."""
        return stage.kind == "old" or (self._replay != "R2" and not self._has_old_pass)

    def _trace_of(self, sequences: NDArray[np.int64], mask_BT: Tensor) -> RoutingTrace:
        """Routes of these sequences; of their prompts alone, where TRL has masked a truncated completion."""
        rollout = self._current()
        trace = rollout.trace.select(sequences)
        lengths, prompts = mask_BT.sum(dim=1).cpu().numpy(), rollout.prompt_lengths[sequences]
        masked = (lengths == prompts) & (lengths < trace.lengths) & bool(self._trainer.mask_truncated_completions)
        return trace.truncated(np.where(masked, prompts, trace.lengths))

    def _recorded_rollout(self, stage: Stage, output: dict[str, Any]) -> Rollout:
        if not stage.recorded:
            raise ReplayError(
                "replay='R2' was asked for, and TRL computed no old log-probs for this rollout, so that there is nothing "
                "to replay; take replay='R3', or raise num_iterations"
            )
        self._number += 1
        return Rollout(self._number, concatenate(stage.recorded), output["prompt_mask"].sum(dim=1).cpu().numpy())

    def _current(self) -> Rollout:
        if self._rollout is None:
            raise ReplayError("TRL trains on a batch that was not generated through _generate: its routes are unknown")
        return self._rollout

    def _measure(self, stage: Stage, logprobs_BR: Tensor, batch: dict[str, Any]) -> None:
        """Trainer beside rollout, at the rollout's weights: probabilities of what was sampled, and executed routes."""
        rollout = self._current()
        if self._replay != "R2":
            executed = concatenate(stage.recorded)
            lengths = executed.lengths
            self.metrics.add_executed(
                routing_mismatch(rollout.trace.select(stage.sequences).truncated(lengths), executed)
            )
        if rollout.logprobs is None:
            return
        counted_BR = batch["completion_mask"] * batch.get("tool_mask", 1)
        counted, trained = counted_BR.bool().cpu().numpy(), logprobs_BR.float().cpu().numpy()
        sampled_BR = np.full(trained.shape, np.nan, np.float32)
        numbers = stage.sequences if len(stage.sequences) else np.arange(len(trained))
        for row, s in enumerate(numbers):
            sampled_BR[row, : len(rollout.logprobs[s])] = rollout.logprobs[s]
        known = counted & ~np.isnan(sampled_BR)
        self.metrics.add_tokens(token_mismatch(trained[known], sampled_BR[known]))


def _sampled_logprobs(rollout: Rollout, output: dict[str, Any]) -> Any:
    """What an engine sampled with, as TRL keeps it, or else what the capture saw."""
    given = output.get("sampling_per_token_logps")
    if given is None:
        return rollout.logprobs
    lengths = rollout.trace.lengths - rollout.prompt_lengths
    return [row[:length] for row, length in zip(given.float().cpu().numpy(), lengths, strict=True)]


def joined(parts: list[Any]) -> tuple[Any, ...]:
    """Results of parts of a batch as one: rows one after another, scalars averaged, what is None left None."""
    return tuple(
        None if values[0] is None else torch.cat(values) if values[0].ndim else torch.stack(values).mean()
        for values in zip(*parts, strict=True)
    )
