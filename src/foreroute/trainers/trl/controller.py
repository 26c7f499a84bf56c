"""Which of TRL's passes is which, and what is replayed in it.

A training step of TRL is, in this order: the rollout; the old-log-prob pass, in which the weights are still those of
the rollout (left out where each generation serves one update); the reference pass; rewards; then shuffling and
splitting into micro-batches, and one update pass for each. Sequences carry a number through all that, in a tensor of
the batch beside TRL's own; the routes stay here, in one trace.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import is_peft_model
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import ServedModel
from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.costs.cluster_file import Cluster
from foreroute.errors import ConfigError, ForerouteError, ReplayError
from foreroute.plan import Topology
from foreroute.replay import ReplayCounts
from foreroute.trace import INDEXER, SAMPLING, RoutingTrace, concatenate
from foreroute.trainers.checks import check_first_rollout
from foreroute.trainers.mismatch_sums import MismatchSums
from foreroute.trainers.trl.capture_generate import GenerateSource
from foreroute.trainers.trl.capture_vllm import VLLMSource
from foreroute.trainers.trl.masked_head import masks_at, scored_on_sampling_masks
from foreroute.trainers.trl.partitioned import whole_where_run
from foreroute.trainers.trl.planning import PlannedWindows
from foreroute.trainers.trl.rollout import (
    Rollout,
    Turn,
    TurnSource,
    joined_tokens,
    joined_turns,
    require_lengths,
    require_version,
)
from foreroute.trainers.trl.rollout_func import ROUTES, EngineSource, require_mapping, returned_trace
from foreroute.trainers.trl.sampling import require_masks

LOG = logging.getLogger(__name__)

Replay = Literal["none", "R2", "R3"]

ROWS = "foreroute_rows"
"""In TRL's batches: int64 [B, 2], the number of the rollout and that of the sequence in it."""


OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""What TRL's batches say of each token beside images, [B, T]."""
CHECKED_SEQUENCES = 16
"""Sequences of the first rollout that are checked. A mix-up on the way concerns every sequence; a few show it."""


@dataclass(eq=False)
class LogprobPass:
    """Log-probs of the policy that TRL is about to compute.

    Attributes:
        kind: the old-log-prob pass of a rollout, or an update.
        sequences: int64 [B], their numbers in the rollout; None before there is one.
        executed: what each part of the pass executed, where that is recorded.
        logprobs_BR: what came out, once it has run.
    """

    kind: Literal["old", "update"]
    sequences: NDArray[np.int64] | None = None
    executed: list[RoutingTrace] = field(default_factory=list)
    logprobs_BR: Tensor | None = None


class TrainerPassController:
    """The passes of one trainer.

    Args:
        trainer: TRL's, set up.
        replay: what to replay.
        require_supported: raises where the trainer's settings do not go with it.
        topology: to execute its passes under plans for; None for none.

    Attributes:
        routed: the policy.
        metrics: mismatch that is not logged yet.
        rollout: what the trainer works on.
        is_on: whether anything is replayed or measured; false from where "none" could not measure.
    """

    def __init__(
        self,
        trainer: Any,
        replay: Replay,
        require_supported: Callable[[], None],
        topology: Topology | Cluster | None = None,
    ) -> None:
        self.metrics = MismatchSums()
        self.rollout: Rollout | None = None
        self.is_on = True
        self._trainer = trainer
        self._replay = replay
        self._turns: list[Turn] = []
        self._now: LogprobPass | None = None
        self._num_rollouts = 0
        self._num_updates = 0
        self._has_old_pass = False
        self._checks_with_images = False
        self._source: TurnSource | None = None
        with self._measuring():
            require_supported()
            self._policy = self._unwrapped(trainer.model)
            self._is_reference = _is_reference(self._policy)
            with whole_where_run(trainer, self._policy):
                self.routed = hf.attach(self._policy)
            self._served = ServedModel.of(self.routed)
            self._source = self._make_source()
        self._windows = None if topology is None else PlannedWindows(trainer, self.routed, topology)
        if isinstance(trainer.rollout_func, EngineSource):
            # a turn is sampled where TRL samples one, so that tools are TRL's to call
            self._source, trainer.rollout_func = trainer.rollout_func, None
            self._source.trainer = trainer

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Where no replay was asked for, what cannot be measured is said once, and TRL trains on as without us."""
        try:
            yield
        except ForerouteError as error:
            if self._replay != "none":
                raise
            if self.is_on:
                LOG.warning("replay='none' measures no mismatch from here on, and trains as TRL does. %s", error)
            self.is_on, self.rollout = False, None

    def _make_source(self) -> TurnSource:
        trainer, replays = self._trainer, self._replay == "R3"
        if trainer.rollout_func is not None and not isinstance(trainer.rollout_func, EngineSource):
            trainer.rollout_func = partial(self._roll_out, trainer.rollout_func)
        elif trainer.use_vllm and self._replay != "R2":
            return VLLMSource(trainer.vllm_generation, trainer.accelerator, self._served)
        return GenerateSource(
            self.routed,
            indexers=replays and self.routed.indexers is not None,
            temperature=trainer.temperature if replays else None,
        )

    @property
    def _captures(self) -> bool:
        """Whether what is sampled now is trained on with its routes; R2 needs none of a rollout."""
        return self.is_on and bool(self._trainer.model.training) and self._replay != "R2"

    def _roll_out(self, function: Callable[..., Any], prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """A user's `rollout_func`. TRL never sees the routes, which it would hand to reward functions."""
        output = require_mapping(function(prompts, trainer))
        routes = output.pop(ROUTES, None)
        if self._captures and {"prompt_ids", "completion_ids"} <= output.keys():  # TRL says what is missing
            prompts, completions = output["prompt_ids"], output["completion_ids"]
            with self._measuring():
                self._note_turn(prompts, returned_trace(routes, prompts, completions, self._served, self._version))
        return output

    def turn(self, sample: Callable[[], Any], prompts: Sequence[Sequence[int]]) -> Any:
        """TRL's `_generate_single_turn`: the prompts of a rollout, or what it begins again with behind tools."""
        if self._source is None or not (self._captures or isinstance(self._source, EngineSource)):
            return sample()
        result, captured = self._source.turn(sample, prompts, self._version)
        if self._captures:
            with self._measuring():
                self._note_turn(prompts, *captured())
        return result

    def _note_turn(self, prompts: Sequence[Sequence[int]], trace: RoutingTrace, logprobs: Any = None) -> None:
        self._turns.append(Turn([len(each) for each in prompts], trace, logprobs))

    def capture(self, generate: Callable[[], Any]) -> Any:
        """TRL's `_generate`, whose prompts, completions and routes become the rollout."""
        self._turns, joined = [], None
        is_first = self._captures and not self._num_rollouts
        result = generate()
        with self._measuring():
            if self._captures:
                joined = self._joined(*result[:3])
        with self._measuring():
            # the check is a forward, which processes that share a model run together
            if is_first and self._replay == "none" and self._over_processes(torch.tensor(float(not self.is_on))):
                raise ReplayError("Another process cannot measure it")
            if joined is not None and is_first:
                self._warn_of_choices(joined[0])
                with self.passing(None):
                    self._check_first(joined[0])
            if joined is not None:
                self.take(*joined)
        return result

    def _joined(self, prompts: Sequence[Any], completions: Sequence[Any], env_masks: Any) -> tuple[Any, ...]:
        """What `take` takes."""
        prompt_lengths, version = [len(each) for each in prompts], self._version
        trace, logprobs = joined_turns(self._turns, joined_tokens(prompts, completions), prompt_lengths)
        self._turns = []
        trace = self.routed.with_lookups(trace)
        require_version(trace, version)
        if self._replay == "R3":
            require_masks(self._trainer, trace)
            require_lengths(env_masks, completions)
        return trace, np.array(prompt_lengths), logprobs, env_masks

    @property
    def _version(self) -> int:
        """What rollouts of the weights of now are stamped with."""
        return int(self._trainer.state.global_step)

    def _warn_of_choices(self, trace: RoutingTrace) -> None:
        if self._replay == "R3" and self.routed.indexers is not None and INDEXER not in trace.streams:
            warnings.warn(
                "the policy has indexers of sparse attention, and the rollout has none of their choices: routes alone "
                "are replayed, and queries attend to other units than in the rollout. Sample with TRL's generate, with "
                "EmbeddedEngine(model, indexers=True), or return traces that have them from a rollout_func",
                stacklevel=2,
            )

    def _check_first(self, trace: RoutingTrace) -> None:
        """Hold some sequences of the first rollout against the policy's own routes, by one forward of it.

        With images that is done in the first pass that TRL gives them to.
        """
        if hasattr(self._trainer.processing_class, "image_processor"):
            self._checks_with_images = True
            return
        part = trace.select(np.arange(min(len(trace), CHECKED_SEQUENCES)))
        tokens = [torch.from_numpy(part.tokens(s).astype(np.int64)) for s in range(len(part))]
        mask = pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True)
        ids, device = pad_sequence(tokens, batch_first=True), self._trainer.accelerator.device

        def forward() -> None:
            self._trainer._get_per_token_logps_and_entropies(
                self._trainer.model,
                ids.to(device),
                mask.to(device),
                1,
                batch_size=self._trainer.args.per_device_train_batch_size,
            )

        check_first_rollout(self.routed, part, forward)

    def take(
        self, trace: RoutingTrace, prompt_lengths: NDArray[np.int64], logprobs: Any = None, env_masks: Any = None
    ) -> Rollout:
        """Begin to work on a rollout; see `Rollout`."""
        self._num_rollouts += 1
        self.rollout = Rollout(self._num_rollouts, trace, prompt_lengths, logprobs, env_masks)
        return self.rollout

    def generate(self, generate: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """TRL's `_generate_and_score_completions`, whose old-log-prob pass is replayed, or recorded for R2."""
        self.rollout = None
        old = LogprobPass("old")
        with self.passing(old):
            output = generate()
        if self.is_on:
            with self._measuring():
                self._take_output(old, output)
        return output

    def _take_output(self, old: LogprobPass, output: dict[str, Any]) -> None:
        self._has_old_pass = output.get("old_per_token_logps") is not None
        if self._has_old_pass != (old.logprobs_BR is not None):
            raise ReplayError(
                "TRL's old log-probs did not come through _get_per_token_logps_and_entropies, so that nothing was "
                "replayed in them"
            )
        if self._replay == "R2":
            self._take_recorded(old, output)
        rollout = self._current().with_logprobs(output.get("sampling_per_token_logps"))
        self.rollout = rollout
        if self._has_old_pass:
            self._measure(old, output)
        output[ROWS] = rollout.rows().to(output["completion_ids"].device)

    def _take_recorded(self, old: LogprobPass, output: dict[str, Any]) -> None:
        if not old.executed:
            raise ReplayError(
                "replay='R2' was asked for, and TRL computed no old log-probs for this rollout, so that there is "
                "nothing to replay; take replay='R3', or raise num_iterations"
            )
        self.take(concatenate(old.executed), output["prompt_mask"].sum(dim=1).cpu().numpy())

    def update(self, compute: Callable[[], Any], inputs: dict[str, Any]) -> Any:
        """TRL's `_compute_loss` on a micro-batch."""
        update = LogprobPass("update")
        with self._measuring():
            if self.is_on:
                update.sequences = self._sequences_in(inputs)
        with self.passing(update):
            loss = compute()
        with self._measuring():
            if self.is_on and update.logprobs_BR is None:
                raise ReplayError(
                    f"{type(self._trainer).__name__} computed a loss without _get_per_token_logps_and_entropies, so "
                    "that nothing was replayed in it"
                )
            if self.is_on and not self._has_old_pass:
                self._measure(update, inputs)
        return loss

    def _sequences_in(self, inputs: dict[str, Any]) -> NDArray[np.int64]:
        if ROWS not in inputs:
            raise ReplayError(f"the micro-batch has no {ROWS!r}: TRL dropped what its generation batch held")
        return self._current().sequences_of(inputs[ROWS])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around TRL's `training_step`. Raises `ReplayError` when no update pass ran in it."""
        before, windows = self._num_updates, self._windows
        with nullcontext() if windows is None else windows.micro_step():
            yield
        with self._measuring():
            if self.is_on and self._num_updates == before:
                raise ReplayError(
                    f"{type(self._trainer).__name__} made a training step without an update pass through _compute_loss "
                    "and _get_per_token_logps_and_entropies, so that nothing was replayed in it"
                )

    def flush(self) -> dict[str, float]:
        """What is to be logged. Starts anew."""
        return self.metrics.flush(self._over_processes) | ({} if self._windows is None else self._windows.sums.flush())

    def _over_processes(self, sums: Tensor) -> Tensor:
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return sums
        total: Tensor = accelerator.reduce(sums.to(accelerator.device), reduction="sum")
        return total

    @contextmanager
    def passing(self, begun: LogprobPass | None) -> Iterator[None]:
        """Log-probs of the policy computed while the context is open belong to this pass, or to none of TRL's."""
        outer, self._now = self._now, begun
        try:
            yield
        finally:
            self._now = outer

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
        """TRL's `_get_per_token_logps_and_entropies`, in parts as TRL has them, each with its own routes and masks.

        Routes are the policy's alone. Masks are the reference's too, whose log-probs are compared with the policy's.
        """
        now = self._now
        each = batch_size or len(input_ids)
        parts_of_batch = [slice(first, first + each) for first in range(0, len(input_ids), each)]
        images: list[dict[str, Any]] = []
        with self._measuring():
            if self.is_on and now is not None:
                images = [images_of(options, rows, len(input_ids)) for rows in parts_of_batch]
        is_policy = self.is_on and self._is_policy(model)
        if now is None or not (is_policy or self._has_masks):
            return compute(input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)
        parts = [
            (
                rows,
                attention_mask[rows],
                partial(compute, input_ids[rows], attention_mask[rows], logits_to_keep, **given),
            )
            for rows, given in zip(parts_of_batch, images, strict=True)
        ]
        if is_policy and self._checks_with_images:
            self._checks_with_images = False
            rows, mask, run = parts[0]
            with self._measuring():
                check_first_rollout(self.routed, self._routes_of(now, rows, mask).trace, run)
        results = []
        with self._executing(now, parts) if is_policy else nullcontext():
            for rows, mask, run in parts:
                with ExitStack() as stack:
                    if is_policy:
                        stack.enter_context(self._routing(now, rows, mask))
                    if self._has_masks:
                        stack.enter_context(self._scoring_on_masks(now, rows, mask, logits_to_keep))
                    results.append(run())
        result = joined(results)
        if not is_policy:
            return result
        now.logprobs_BR = result[0].detach()
        self._num_updates += now.kind == "update"
        return result

    def _is_policy(self, model: Any) -> bool:
        return self._unwrapped(model) is self._policy and not self._is_reference()

    def _unwrapped(self, model: Any) -> Any:
        return self._trainer.accelerator.unwrap_model(model, keep_torch_compile=False)

    def _executing(
        self, now: LogprobPass, parts: Sequence[tuple[slice, Tensor, object]]
    ) -> AbstractContextManager[None]:
        """A plan of the old-log-prob pass, which is over when it has run; or that of the window of an update."""
        if self._windows is not None and now.kind == "update":
            self._windows.begin(self._routes_in)
        elif self._windows is not None and self._replay == "R3":
            return self._windows.executing([self._routes_of(now, rows, mask) for rows, mask, _ in parts], "recompute")
        return nullcontext()

    @contextmanager
    def _routing(self, now: LogprobPass, rows: slice, mask_BT: Tensor) -> Iterator[None]:
        """Replay what belongs to a part of a pass; record it where the weights are still the rollout's."""
        update, counts, recording = now.kind == "update", ReplayCounts(), None
        at_rollout_weights = not update or not self._has_old_pass
        with ExitStack() as stack:
            if self._replay == "R3" or (self._replay == "R2" and update):
                stack.enter_context(self.routed.replay(self._routes_of(now, rows, mask_BT)))
                stack.enter_context(self.routed.listening(counts))
            elif at_rollout_weights:
                choices = self._replay == "R2" and self.routed.indexers is not None
                recording = stack.enter_context(self.routed.record(indexers=choices))
            yield
        if recording is not None:
            now.executed.append(recording.trace())
        self.metrics.add_counts(counts, executed=at_rollout_weights and self._replay == "R3", native=update)

    @property
    def _has_masks(self) -> bool:
        """Whether the rollout has sampling masks to score on."""
        return self._replay == "R3" and self.rollout is not None and SAMPLING in self.rollout.trace.streams

    def _scoring_on_masks(
        self, now: LogprobPass, rows: slice, mask_BT: Tensor, num_scored: int
    ) -> AbstractContextManager[None]:
        """Score a part of a pass on the sets that its tokens were drawn from."""
        rollout = self._current()
        sequences = rollout.numbers(now.sequences)[rows]
        sampled_BR = rollout.sampled(sequences, num_scored)
        masks = masks_at(rollout.trace.select(sequences), mask_BT.bool().cpu().numpy(), sampled_BR)
        return scored_on_sampling_masks(*masks)

    def _routes_of(self, now: LogprobPass, rows: slice, mask_BT: Tensor) -> TraceRows:
        """Made once for a part of the rollout, which TRL runs again in every iteration."""
        rollout = self._current()
        sequences = rollout.numbers(now.sequences)[rows]
        lengths = mask_BT.sum(dim=1).cpu().numpy()
        part = (*sequences.tolist(), *lengths.tolist())
        if part not in rollout.ready:
            drops_truncated = bool(self._trainer.mask_truncated_completions)
            trace = rollout.routes(sequences, lengths, drops_truncated=drops_truncated)
            rollout.ready[part] = self.routed.rows(trace)
        return rollout.ready[part]

    def _routes_in(self, inputs: dict[str, Any]) -> TraceRows:
        """The routes of a micro-batch that TRL keeps."""
        mask_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        return self._routes_of(LogprobPass("update", self._sequences_in(inputs)), slice(None), mask_BT)

    def _measure(self, seen: LogprobPass, batch: dict[str, Any]) -> None:
        """Trainer beside rollout, at the rollout's weights."""
        rollout = self._current()
        sequences = rollout.numbers(seen.sequences)
        if self._replay == "none":
            self.metrics.compare_routes(rollout.trace.select(sequences), concatenate(seen.executed))
        if rollout.logprobs is not None and seen.logprobs_BR is not None:
            trained_BR = seen.logprobs_BR
            sampled = [torch.from_numpy(rollout.logprobs[s]) for s in sequences]
            sampled_BR = torch.full(trained_BR.shape, torch.nan)
            for row, own in zip(sampled_BR, sampled, strict=True):
                row[: len(own)] = own
            counted_BR = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
            self.metrics.compare_tokens(sampled_BR.to(trained_BR.device), trained_BR, counted_BR)

    def _current(self) -> Rollout:
        if self.rollout is None:
            raise ReplayError("TRL trains on a batch that was not generated through _generate: its routes are unknown")
        return self.rollout


def joined(parts: list[Any]) -> tuple[Any, ...]:
    """Results of parts of a batch as one: rows one after another, scalars averaged, what is None left None."""
    return tuple(
        None if values[0] is None else torch.cat(values) if values[0].ndim else torch.stack(values).mean()
        for values in zip(*parts, strict=True)
    )


def images_of(options: dict[str, Any], rows: slice, num_rows: int) -> dict[str, Any]:
    """TRL's further arguments of a batch, for some of its rows: images go with the sequences that they are in.

    Raises:
        ConfigError: where images have no grid that says how many patches each has.
    """
    found = {name for name, value in options.items() if isinstance(value, Tensor | list)}
    if not found or (not rows.start and rows.stop >= num_rows):
        return options
    known = {"num_images", *OF_TOKENS} | ({"pixel_values", "image_grid_thw"} if "image_grid_thw" in found else set())
    if others := sorted(found - known):
        raise ConfigError(
            f"the batch holds {', '.join(others)}, and routing replay cuts batches of images by "
            "image_grid_thw alone; let per_device_train_batch_size be all sequences of a rollout, or take replay='none'"
        )
    part = options | {name: options[name][rows] for name in found & {"num_images", *OF_TOKENS}}
    if "image_grid_thw" in found:
        first, last = sum(options["num_images"][: rows.start]), sum(options["num_images"][: rows.stop])
        grid_thw = options["image_grid_thw"]
        before, after = (int(grid_thw[:end].prod(1).sum()) for end in (first, last))
        images = {"image_grid_thw": grid_thw[first:last], "pixel_values": options["pixel_values"][before:after]}
        part |= images if first < last else dict.fromkeys([*images, "num_images"])
    return part


def _is_reference(policy: Any) -> Callable[[], bool]:
    """A question that can be put at any time: whether the policy's adapters are off, or others than now.

    TRL has no second model where PEFT is used: for the reference pass it disables the adapters, or, when an adapter is
    trained on, activates a copy of it named "ref".
    """
    if not is_peft_model(policy):
        return lambda: False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]
    trained = policy.active_adapter

    def now() -> bool:
        return policy.active_adapter != trained or any(layer.disable_adapters for layer in layers)

    return now
