"""Passes of TRL, told apart, and the replay in each.

A training step of TRL is, in this order: the rollout; the old-log-prob pass, in which the weights are still those of
the rollout (left out where each generation serves one update); the reference pass; rewards; then shuffling and
splitting into micro-batches, and one update pass for each.

- A *rollout* is what one generation brought: sequences, whose routes stay here, in one trace. Each has a number, which
  travels in a tensor of the batch beside TRL's own.
- A *turn* is one request to an engine: a whole rollout, or what is sampled behind the answers of tools.
- A *pass* computes log-probs of a batch: of a whole rollout, old and reference; of a micro-batch, in an update.
- A *slice* of a batch has `per_device_train_batch_size` sequences, which TRL runs in one forward.

From the first forward of a pass to the step of the optimizer nothing here reads from the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from foreroute.adapters import hf
from foreroute.adapters.hf import RoutedTransformer
from foreroute.costs.cluster_file import Cluster
from foreroute.errors import BatchMismatchError, EngineError, ForerouteError, ReplayError
from foreroute.mismatch import Suspicion
from foreroute.plan import Topology
from foreroute.replay import Policy, ReplayRows
from foreroute.replay.indexers import warn_of_choices
from foreroute.replay.rows import to_device
from foreroute.trace import INDEXER, SAMPLING, RoutingTrace, concatenate
from foreroute.trainers.checks import check_first_rollout, judge_together
from foreroute.trainers.mismatch_sums import MismatchSums
from foreroute.trainers.sentinel import RolloutSentinel, Watching, kept_tokens
from foreroute.trainers.trl.capture import RolloutCapture
from foreroute.trainers.trl.masked_head import scored_on_sampling_masks
from foreroute.trainers.trl.planning import PlannedWindows
from foreroute.trainers.trl.rollout import LOGPROBS, LOGPROBS_OF_TRL, Decisions, Rollout
from foreroute.trainers.trl.settings import Replay, require_supported
from foreroute.trainers.weights_check import WeightsCheck

if TYPE_CHECKING:
    from foreroute.adapters.hf.trace_rows import TraceRows
    from foreroute.core.deferred_checks import DeferredChecks
    from foreroute.replay import Recording

LOG = logging.getLogger(__name__)
CHECKED_SEQUENCES = 16
"""Sequences of the first rollout that are checked. A mix-up on the way concerns every sequence; a few show it."""


class MeasuringGuard:
    """Lets errors of its context through where replay was asked for. Under "none" the first one is logged.

    Measuring is off then, and TRL trains on. A context must run nothing of TRL's, whose results are needed then too.
    """

    def __init__(self, replay: Replay) -> None:
        self.is_on = True  # False only under "none"
        self._raises = replay != "none"

    def __enter__(self) -> None:
        """Begin to measure; what cannot be measured raises."""

    def __exit__(self, error_class: object, error: BaseException | None, traceback: object) -> bool:
        """Say whether an error ends here."""
        if self._raises or not isinstance(error, ForerouteError):
            return False
        if self.is_on:
            LOG.warning("replay='none' measures no mismatch from here on, and trains as TRL does. %s", error)
        self.is_on = False
        return True


@dataclass(eq=False)
class LogprobPass:
    """Log-probs of the policy that TRL is about to compute: old ones of a rollout, or those of an update."""

    is_update: bool
    batch: dict[str, Any] | None = None  # TRL's micro-batch of an update
    recorded: RoutingTrace | None = None  # for R2
    logprobs_BR: Tensor | None = None  # what came out, once it has run


class TrainerPassController:
    """The passes of one trainer of TRL, set up."""

    routed: RoutedTransformer  # the policy; left out where it cannot be measured

    def __init__(
        self, trainer: Any, replay: Replay, topology: Topology | Cluster | None, plan: object, sentinel: Watching
    ) -> None:
        self.rollout: Rollout | None = None  # that the trainer works on
        self._trainer = trainer
        self._replay = replay
        self._metrics = MismatchSums(replays_rollout=replay == "R3")
        self._watching = sentinel
        self._guard = MeasuringGuard(replay)
        self._now: LogprobPass | None = None
        self._num_rollouts = 0
        self._num_updates = 0
        self._suspected = 0  # by the sentinel since the last log
        self._weights: list[WeightsCheck] = []  # of the rollouts since then
        self._checks_with_images = False
        attached = None
        with self._guard:
            require_supported(trainer, replay)
            self._policy = self._unwrapped(trainer.model)
            self._is_reference = _is_reference(self._policy)
            with _whole_where_run(self._policy):
                self.routed = attached = hf.attach(self._policy)
        self.capture = RolloutCapture(trainer, attached, replay, self._guard)
        with self._guard:
            self._require_measured_everywhere()
        options = {} if plan is None else plan
        self._windows = None if topology is None else PlannedWindows(trainer, self.routed, topology, options)
        self._sentinel = RolloutSentinel(self.routed) if replay == "R3" and sentinel != "off" else None

    @property
    def is_open(self) -> bool:
        """Say whether what TRL runs now is replayed, or measured."""
        return self._guard.is_on and bool(self._trainer.model.training)

    def end_rollout(self, prompts: Sequence[Any], completions: Sequence[Any], env_masks: Any) -> None:
        """Behind TRL's `_generate`: what it gave, and the routes that were captured meanwhile, become the rollout."""
        is_first, rollout = not self._num_rollouts, None
        with self._guard:
            join = partial(self.capture.join_rollout, prompts, completions, env_masks)
            # under "none" a process that cannot measure trains on, and asks nobody
            rollout = join() if self._replay == "none" else judge_together(join, self._over_processes)
        with self._guard:
            if is_first:  # the check is a forward, which processes that share a model run together
                self._require_measured_everywhere()
            if rollout is None:
                return
            if is_first:
                self._warn_of_choices(rollout.trace)
                with self.passing(None):
                    self._check_first(rollout.trace)
            self.take(rollout)

    def take(self, rollout: Rollout) -> None:
        """Begin to work on a rollout."""
        self._num_rollouts += 1
        rollout.number, rollout.make_rows = self._num_rollouts, self.routed.rows
        if self._replay == "none":  # routes alone are compared: choices of indexers are cut on the host, which waits
            rollout.make_rows = lambda trace: self.routed.rows(trace.without_streams(INDEXER))
        rollout.drops_truncated = bool(self._trainer.mask_truncated_completions)
        if self._replay != "R3":  # under which alone tokens are scored on their sets
            rollout.trace = rollout.trace.without_streams(SAMPLING)
        self.rollout = rollout
        if self._sentinel is not None:
            self._sentinel.begin_rollout()
            self._weights.append(WeightsCheck())

    @contextmanager
    def passing(self, begun: LogprobPass | None) -> Iterator[None]:
        """Log-probs of the policy computed while the context is open belong to this pass, or to none of TRL's."""
        outer, self._now = self._now, begun
        try:
            yield
        finally:
            self._now = outer

    def end_generation(self, old: LogprobPass, output: dict[str, Any]) -> None:
        """Behind TRL's `_generate_and_score_completions`: let its batch carry the numbers of its sequences."""
        with self._guard:
            has_old_pass = self._metrics.has_old_pass = output.get("old_per_token_logps") is not None
            if has_old_pass != (old.logprobs_BR is not None):
                raise ReplayError(
                    "TRL's old log-probs did not come through _get_per_token_logps_and_entropies, so that nothing was "
                    "replayed in them"
                )
            if self._replay == "R2":
                self._take_recorded(old, output["prompt_mask"])
            rollout = self._current_rollout()
            masks = output["prompt_mask"], output["completion_mask"]
            rollout.read_mask(torch.cat(masks, dim=1), masks[1].shape[1])
            output |= rollout.columns(output)
            if has_old_pass:
                self._compare_tokens(old, output)
            if self._sentinel is not None and self._watching in ("drop", "stop"):
                self._act(self._sentinel, rollout, output)

    @contextmanager
    def updating(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Around TRL's `_compute_loss` on a micro-batch."""
        update = LogprobPass(is_update=True, batch=inputs)
        with self.passing(update):
            yield
        if update.logprobs_BR is None:
            self._refuse_unreplayed("computed a loss without _get_per_token_logps_and_entropies")
        elif not self._metrics.has_old_pass:
            with self._guard:
                self._compare_tokens(update, inputs)

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Around TRL's `training_step`. Raises `ReplayError` when no update pass ran in it."""
        num_before, windows = self._num_updates, self._windows
        with nullcontext() if windows is None else windows.micro_step():
            yield
        if self._num_updates == num_before:
            self._refuse_unreplayed(
                "made a training step without an update pass through _compute_loss and "
                "_get_per_token_logps_and_entropies"
            )

    def flush(self) -> dict[str, float]:
        """Read what is to be logged of all processes, and start anew. A collective call, for which the host waits."""
        logs = {} if self._windows is None else self._windows.flush()
        if self._sentinel is not None:
            found = judge_together(self._sentinel.judge, self._over_processes)
            self._suspected += len(found)
            self._judge_weights(found)
            counted = self._over_processes(torch.tensor(float(self._suspected)))
            logs["sentinel/suspicions"], self._suspected = float(counted), 0
        with self._guard:
            logs |= self._metrics.flush(self._over_processes)
        return logs

    def run_pass(
        self,
        compute: Callable[[], Any],
        model: Any,
        mask_BT: Tensor,
        num_scored: int,
        batch_size: int | None,  # of the slices that TRL cuts the batch into
    ) -> Any:
        """Run TRL's `_get_per_token_logps_and_entropies`, each slice of the batch with its routes and masks."""
        # Routes are the policy's alone. Masks are the reference's too, whose log-probs are compared with the policy's.
        now, found = self._now, None
        is_policy = now is not None and self._unwrapped(model) is self._policy and not self._is_reference()
        if now is not None and (is_policy or self._has_masks):
            with self._guard:
                found = self._find_decisions(now, mask_BT, num_scored, batch_size or len(mask_BT))
        if now is None or found is None:
            return compute()
        if is_policy and self._checks_with_images and found:
            self._checks_with_images = False
            with self._guard:
                check_first_rollout(self.routed, concatenate(each.routes.trace for each in found), compute)
        windows = self._windows if is_policy else None
        with nullcontext() if windows is None else self._executing_plan(windows, now, found), ExitStack() as stack:
            recording = self._open_sessions(stack, now, found) if is_policy else None
            if masks := [each.masks for each in found if each.masks is not None]:
                stack.enter_context(scored_on_sampling_masks(masks))
            result = compute()
            # A session that ends where no gradients are recorded waits for what the device finds wrong. Behind an
            # old-log-prob pass comes an update, and the optimizer's step looks before anything is learned.
            with torch.enable_grad():
                stack.close()
        if is_policy:
            now.recorded = None if recording is None else recording.trace()
            now.logprobs_BR = result[0].detach()
            self._num_updates += now.is_update
        return result

    @property
    def _has_masks(self) -> bool:
        return self.rollout is not None and SAMPLING in self.rollout.trace.streams

    def _unwrapped(self, model: Any) -> Any:
        return self._trainer.accelerator.unwrap_model(model, keep_torch_compile=False)

    def _current_rollout(self) -> Rollout:
        if self.rollout is None:
            raise ReplayError("TRL trains on a batch that was not generated through _generate: its routes are unknown")
        return self.rollout

    def _find_decisions(self, now: LogprobPass, mask_BT: Tensor, num_scored: int, size: int) -> list[Decisions]:
        """Give what the forwards of a pass take, nothing where R2 is still to record it."""
        if self._replay == "R2" and not now.is_update:
            return []
        rollout = self._current_rollout()
        if now.batch is None:
            rollout.read_mask(mask_BT, num_scored)
            sequences = np.arange(len(rollout.trace))
        else:
            sequences = rollout.sequences_of(now.batch)
        return [rollout.decisions(sequences[first : first + size]) for first in range(0, len(sequences), size)]

    def _executing_plan(
        self, windows: PlannedWindows, now: LogprobPass, found: Sequence[Decisions]
    ) -> AbstractContextManager[object]:
        """Open a plan of the old-log-prob pass, until it has run; or see to that of the window of an update."""
        if now.is_update:
            rollout = self._current_rollout()
            windows.begin(lambda inputs: rollout.decisions(rollout.sequences_of(inputs)).routes)
        elif self._replay == "R3":
            return windows.executing([each.routes for each in found], "recompute")
        return nullcontext()

    def _open_sessions(self, stack: ExitStack, now: LogprobPass, found: Sequence[Decisions]) -> Recording | None:
        """Have a pass of the policy replayed or compared, or recorded where nothing is known of it."""
        if not found:
            return stack.enter_context(self.routed.record(indexers=self.routed.indexers is not None))
        routes: TraceRows | RoutesInTurn = found[0].routes
        if len(found) > 1:
            routes = stack.enter_context(self._in_turn([each.routes for each in found]))
        is_compared = self._metrics.at_rollout_weights(update=now.is_update)
        if self._replay != "none":
            stack.enter_context(self._metrics.counting(self.routed, update=now.is_update))
            stack.enter_context(self.routed.replay(routes))
            if self._sentinel is not None and is_compared:
                lengths, sequences = ([each.routes.trace.lengths for each in found], [each.sequences for each in found])
                stack.enter_context(self._sentinel.counting(np.concatenate(lengths), np.concatenate(sequences)))
        elif is_compared:
            stack.enter_context(self._metrics.comparing(self.routed, routes))
        return None

    @contextmanager
    def _in_turn(self, slices: Sequence[TraceRows]) -> Iterator[RoutesInTurn]:
        routes = RoutesInTurn(slices)
        yield routes
        with self._guard:
            routes.require_none_left()

    def _refuse_unreplayed(self, what: str) -> None:
        with self._guard:
            raise ReplayError(f"{type(self._trainer).__name__} {what}, so that nothing was replayed in it")

    def _take_recorded(self, old: LogprobPass, prompt_mask: Tensor) -> None:
        if old.recorded is None:
            raise ReplayError(
                "replay='R2' was asked for, and TRL computed no old log-probs for this rollout, so that there is "
                "nothing to replay; take replay='R3', or raise num_iterations"
            )
        self.take(Rollout(old.recorded, prompt_mask.sum(dim=1).cpu().numpy()))

    def _compare_tokens(self, seen: LogprobPass, batch: dict[str, Any]) -> None:
        """Add log-probs of a pass at the rollout's weights to the metrics, beside those of the rollout."""
        sampled_BR = batch.get(LOGPROBS_OF_TRL, batch.get(LOGPROBS))
        if sampled_BR is not None and seen.logprobs_BR is not None:
            counted_BR = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
            log_r_BR, known_BR = self._metrics.compare_tokens(sampled_BR, seen.logprobs_BR, counted_BR)
            if self._weights:
                self._weights[-1].add(log_r_BR, known_BR)

    def _act(self, sentinel: RolloutSentinel, rollout: Rollout, output: dict[str, Any]) -> None:
        """Judge a rollout behind its old-log-prob pass, where TRL reads its own metrics, and drop tokens or stop."""
        if not self._metrics.has_old_pass:
            raise ReplayError(
                f"sentinel={self._watching!r} was asked for, and TRL computed no old log-probs for this rollout, so "
                "that nothing was replayed before the update; take sentinel='warn', or raise num_iterations"
            )
        found = judge_together(sentinel.judge, self._over_processes)
        self._suspected += len(found)
        if self._watching == "stop" and float(self._over_processes(torch.tensor(float(len(found))))):
            # all processes end together
            seen = (
                f"{found[0].sentence}. {found[0].looks_like.advice}"
                if found
                else "another process says where, in its log"
            )
            raise BatchMismatchError(f"rollout {rollout.number} looks wrong: {seen}")
        self._judge_weights(found)
        if found:
            mask_BR = output["completion_mask"]
            kept_S = kept_tokens(found, rollout.prompt_lengths + mask_BR.shape[1]) - rollout.prompt_lengths
            kept_BR = np.arange(mask_BR.shape[1]) < kept_S[:, None]
            LOG.warning("The sentinel: tokens of %d sequences leave the loss", (~kept_BR.all(1)).sum())
            output["tool_mask"] = to_device(kept_BR.astype(np.int64), mask_BR.device) * output.get("tool_mask", 1)

    def _judge_weights(self, found: Sequence[Suspicion]) -> None:
        """Say, or under "stop" raise, that a sync garbled weights, unless rows are what is wrong. A collective call."""
        # a check for each rollout, so that a wrong one is not hidden by those before it
        checks, self._weights = self._weights, []
        for check in checks:
            try:
                check.judge(lambda mine: gather_object([mine]))
            except EngineError as error:
                if self._watching == "stop":
                    raise
                if not found and self._trainer.accelerator.is_main_process:
                    self._suspected += 1
                    LOG.warning("The sentinel: %s", error)

    def _over_processes(self, sums: Tensor) -> Tensor:
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            return sums
        total: Tensor = accelerator.reduce(sums.to(accelerator.device), reduction="sum")
        return total

    def _require_measured_everywhere(self) -> None:
        """Raise `ReplayError` where another process cannot measure. Under "none" a collective call."""
        if self._replay == "none" and self._over_processes(torch.tensor(float(not self._guard.is_on))):
            raise ReplayError("Another process cannot measure it")

    def _warn_of_choices(self, trace: RoutingTrace) -> None:
        if self._replay == "R3" and self.routed.indexers is not None and INDEXER not in trace.streams:
            warn_of_choices(
                "the rollout has none of their choices",
                "Sample with TRL's generate, with EmbeddedEngine(model, indexers=True), or return traces that have "
                "them from a rollout_func",
            )

    def _check_first(self, trace: RoutingTrace) -> None:
        """Hold some sequences of the first rollout against the policy's native routes, by one forward of it."""
        if hasattr(self._trainer.processing_class, "image_processor"):
            self._checks_with_images = True  # in the first pass that TRL gives images to
            return
        part = trace.select(np.arange(min(len(trace), CHECKED_SEQUENCES)))
        tokens = [torch.from_numpy(part.tokens(s).astype(np.int64)) for s in range(len(part))]
        mask = pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True)
        ids, device = pad_sequence(tokens, batch_first=True), self._trainer.accelerator.device
        size = self._trainer.args.per_device_train_batch_size
        compute = partial(self._trainer._get_per_token_logps_and_entropies, self._trainer.model)
        check_first_rollout(self.routed, part, lambda: compute(ids.to(device), mask.to(device), 1, batch_size=size))


class RoutesInTurn:
    """Routes of the slices of a batch, which TRL runs one after the other."""

    versions = ()

    def __init__(self, slices: Sequence[TraceRows]) -> None:
        self._num_slices, self._left = len(slices), list(slices)

    def of_pass(self, chunk: int, args: Any, policy: Policy, checks: DeferredChecks) -> ReplayRows:
        """Give the rows of the next slice, whose tokens are compared with those of the forward.

        Raises `ReplayError` for a forward behind the last slice.
        """
        if not self._left:
            raise ReplayError(
                f"TRL ran more forwards of a batch than its {self._num_slices} slices, whose routes are known"
            )
        return self._left.pop(0).of_pass(chunk, args, policy, checks)

    def require_none_left(self) -> None:
        """Raise `ReplayError` when a pass has ended before the last slice."""
        if self._left:
            ran = self._num_slices - len(self._left)
            raise ReplayError(
                f"TRL ran {ran} forwards of a batch of {self._num_slices} slices, so that not all routes were replayed"
            )


def _is_reference(policy: Any) -> Callable[[], bool]:
    """Make a question that can be put at any time: whether the policy's adapters are off, or others than now."""
    # TRL has no second model where PEFT is used: for the reference pass it disables the adapters, or, when an adapter
    # is trained on, activates a copy of it named "ref"
    if not is_peft_model(policy):
        return lambda: False
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]
    trained = policy.active_adapter

    def is_off() -> bool:
        return policy.active_adapter != trained or any(layer.disable_adapters for layer in layers)

    return is_off


@contextmanager
def _whole_where_run(policy: nn.Module) -> Iterator[None]:
    """While the context is open, each layer has its parameters whole while it runs, and what is in no layer its own.

    At DeepSpeed's ZeRO stage 3 transformers deals them out where it loads a model for a trainer, and training puts
    hooks on it that gather them. This is for forwards in between.
    """
    running: list[AbstractContextManager[Any]] = []  # of modules that run in one another

    def gather(parameters: list[nn.Parameter], *_: Any) -> None:
        import deepspeed

        running.append(deepspeed.zero.GatheredParameters(parameters))
        running[-1].__enter__()

    def release(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as stack:
        for module, parameters in _gathered_together(policy):
            if any(hasattr(parameter, "ds_id") for parameter in parameters):
                stack.callback(module.register_forward_pre_hook(partial(gather, parameters)).remove)
                stack.callback(module.register_forward_hook(release, always_call=True).remove)
        yield


def _gathered_together(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    # whole layers, as PEFT's wrappers read parameters of what they wrap; elsewhere each module and its own
    if isinstance(module, nn.ModuleList):
        yield from ((layer, list(layer.parameters())) for layer in module)
        return
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        yield from _gathered_together(child)
