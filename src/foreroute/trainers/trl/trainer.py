"""TRL's trainer with routing replay: what is overridden, and what is refused. `controller.py` does the work.

TRL sends old, reference and current log-probs through one method, shuffles and splits whatever tensors a generation
batch holds, and has a public door for other rollout engines. Replay stands at those three places:

    _generate, _generate_single_turn           the routes of each turn are captured, and joined
    _generate_and_score_completions            each sequence gets its row number, which TRL then shuffles and splits
    _get_per_token_logps_and_entropies         replayed in old and update passes of the policy, in no other
    _compute_loss, training_step, log          the update, the proof that it was replayed, and the metrics
    _load_from_checkpoint, _load_best_model    experts are loaded too, which transformers leaves as they are
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trl
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from foreroute.adapters.checkpoint import weight_files
from foreroute.adapters.hf.loading import load_complete
from foreroute.costs.cluster_file import Cluster
from foreroute.errors import AttachError, ConfigError, shown
from foreroute.plan import PlanOptions, Topology
from foreroute.replay.arguments import require_choice
from foreroute.trainers.checks import require_overridden
from foreroute.trainers.sentinel import Watching
from foreroute.trainers.trl.capture_vllm import colocated_vllm_returns_decisions
from foreroute.trainers.trl.controller import LogprobPass, TrainerPassController
from foreroute.trainers.trl.settings import Replay


class RoutingReplay:
    """Routing replay for TRL's `GRPOTrainer` and trainers derived from it; put it first among the bases.

        class MyTrainer(RoutingReplay, MyGRPOTrainer): ...

    Args:
        *args: what the trainer takes.
        replay: "R3", the rollout's routes in the old-log-prob and update passes; "R2", those of the old-log-prob pass
            in the update passes; "none", no replay, but the same metrics. Where these cannot be had, the log says so.
        topology: to run what is replayed under plans of its routes, which put replicas of busy experts on other ranks:
            of the ranks that share experts, or what `load_cluster` reads, by whose rates a pass runs at homes where
            its plan saves too little. The policy is one that was loaded with `ep_implementation="foreroute"`.
        plan: the planner's options, `PlanOptions` or a table of them. Homes and micro-batches stay.
        sentinel: what is done under R3 about rows that do not look like those of the run so far (docs/diagnose.md):
            "warn" logs them; "drop" takes the tokens behind them out of the loss, and "stop" ends the run, both behind
            the old-log-prob pass; or "off".
        **kwargs: what the trainer takes.

    Raises:
        AttachError: when this release of TRL lacks what replay stands on, the model is not replayable, or a topology
            is given and foreroute does not spread its experts.
        ConfigError: for settings under which replay is not supported or would have no effect; not with "none". For a
            topology with "none", of other ranks, or without slots; for options of plans that are unknown, or
            cannot be carried out; and for a sentinel that drops or stops without R3.
    """

    # TRL's trainer defines these; a mixin only sees them at run time
    args: Any
    model: Any
    state: Any
    accelerator: Any
    is_fsdp_enabled: Any
    is_deepspeed_enabled: Any

    def __init__(
        self,
        *args: Any,
        replay: Replay = "R3",
        topology: Topology | Cluster | None = None,
        plan: PlanOptions | Mapping[str, object] | None = None,
        sentinel: Watching = "warn",
        **kwargs: Any,
    ) -> None:
        _require_trl(type(self))
        require_choice("replay", replay, Replay)
        require_choice("sentinel", sentinel, Watching)
        if sentinel in ("drop", "stop") and replay != "R3":
            raise ConfigError(
                f"sentinel={sentinel!r} judges replayed routes of the rollout; take replay='R3', or leave it out"
            )
        if topology is not None and replay == "none":
            raise ConfigError("a topology is given for plans, which are made of replayed routes; take replay='R3'")
        if plan is not None and topology is None:
            raise ConfigError(f"plan is {shown(plan)}, and nothing is planned without a topology; give both")
        with colocated_vllm_returns_decisions(self, replay):
            super().__init__(*args, **kwargs)
        if self.args.use_liger_kernel and replay != "none":
            # as transformers does when training starts: replay is proven on the modules that it puts in
            apply_liger_kernel(self.model, self.args.liger_kernel_config)
        self.routing = TrainerPassController(self, replay, topology, plan, sentinel)

    def _generate(self, prompts: list[Any]) -> Any:
        if not self.routing.capture.is_open:
            return super()._generate(prompts)  # type: ignore[misc]
        self.routing.capture.begin_rollout()
        result = super()._generate(prompts)  # type: ignore[misc]
        self.routing.end_rollout(*result[:3])
        return result

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **options: Any) -> Any:
        sample = partial(super()._generate_single_turn, prompt_ids, *args, **options)  # type: ignore[misc]
        return self.routing.capture.take_turn(prompt_ids, sample)

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        if not self.routing.is_open:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self.routing.rollout, old = None, LogprobPass(is_update=False)
        with self.routing.passing(old):
            output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self.routing.end_generation(old, output)
        return output

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        compute = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        call = partial(compute, model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)
        return self.routing.run_pass(call, model, attention_mask, logits_to_keep, batch_size)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        if not self.routing.is_open:
            return super()._compute_loss(model, inputs)  # type: ignore[misc]
        with self.routing.updating(inputs):
            return super()._compute_loss(model, inputs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step of TRL. Raises `ReplayError` when no pass of the policy was replayed in it."""
        with self.routing.training_step():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        _load_experts(self, Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        super()._load_best_model()  # type: ignore[misc]
        folder = Path(self.state.best_model_checkpoint)
        if weight_files(folder):  # transformers warns where there are none: the run has ended well
            _load_experts(self, folder)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does, with the mismatch and what plans did since the last training log."""
        # all processes make the trainer's own logs; a callback's may be of one process, where nothing can be reduced
        if self.model.training and not logs.keys().isdisjoint(("loss", "train_loss")):
            logs.update(self.routing.flush())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class GRPOTrainer(RoutingReplay, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with routing replay; see `RoutingReplay` for what it adds."""


def _require_trl(trainer: type) -> None:
    """Raise `AttachError` unless a class is derived from TRL's trainer, which has what is overridden."""
    if not issubclass(trainer, trl.GRPOTrainer):
        raise AttachError(
            f"{trainer.__name__} is not derived from trl.GRPOTrainer; write class {trainer.__name__}(RoutingReplay, "
            "trl.GRPOTrainer)"
        )
    require_overridden("trl", trl.__version__, RoutingReplay, trl.GRPOTrainer)


def _load_experts(trainer: RoutingReplay, folder: Path) -> None:
    """Load a checkpoint by `from_pretrained`, which joins experts that are stored one by one; Trainer does not.

    Raises `ConfigError` where it lacks weights of the model.
    """
    # adapters hold no experts of the model, and what is sharded has checkpoints that are loaded as they are
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    is_sharded = is_sharded or any(isinstance(weight, DTensor) for weight in trainer.model.parameters())
    if isinstance(trainer.model, PreTrainedModel) and not is_sharded:
        trainer.model.load_state_dict(load_complete(type(trainer.model), folder, folder).state_dict())
