"""TRL's trainer with routing replay: what is overridden, and what is refused. `controller.py` does the work.

TRL sends old, reference and current log-probs through one method, shuffles and splits whatever tensors a generation
batch holds, and has a public door for other rollout engines. Replay stands at those three places:

    _generate, _generate_single_turn           the routes of each turn are captured, and joined
    _generate_and_score_completions            each sequence gets its row number, which TRL then shuffles and splits
    _get_per_token_logps_and_entropies         replayed in old and update passes of the policy, in no other
    _compute_loss, training_step, log          the update, the proof that it was replayed, and the metrics
"""

from __future__ import annotations

from functools import partial
from typing import Any

import trl
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers.integrations.liger import apply_liger_kernel
from trl.generation.vllm_client import VLLMClient
from trl.trainer import utils

from foreroute.costs.cluster_file import Cluster
from foreroute.errors import AttachError, ConfigError
from foreroute.plan import Topology
from foreroute.replay.arguments import require_choice
from foreroute.trainers.checks import Refusals, refuse, require_overridden
from foreroute.trainers.trl.capture import Replay
from foreroute.trainers.trl.capture_vllm import colocated_vllm_returns_decisions
from foreroute.trainers.trl.controller import TrainerPassController
from foreroute.trainers.trl.rollout_func import EngineSource
from foreroute.trainers.trl.sampling import cuts_of, refusals


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
        **kwargs: what the trainer takes.

    Raises:
        AttachError: when this release of TRL lacks what replay stands on, the model is not replayable, or a topology
            is given and foreroute does not spread its experts.
        ConfigError: for settings under which replay is not supported or would have no effect; not with "none". For a
            topology with "none", of other ranks, or without slots.
    """

    # TRL's trainer defines these; a mixin only sees them at run time
    args: Any
    model: Any
    accelerator: Any

    def __init__(
        self, *args: Any, replay: Replay = "R3", topology: Topology | Cluster | None = None, **kwargs: Any
    ) -> None:
        _require_trl(type(self))
        require_mode(replay)
        if topology is not None and replay == "none":
            raise ConfigError("a topology is given for plans, which are made of replayed routes; take replay='R3'")
        with colocated_vllm_returns_decisions(self, replay):
            super().__init__(*args, **kwargs)
        if self.args.use_liger_kernel and replay != "none":
            # as transformers does when training starts: replay is proven on the modules that it puts in
            apply_liger_kernel(self.model, self.args.liger_kernel_config)
        self.routing = TrainerPassController(self, replay, partial(require_supported, self, replay), topology)

    def _generate(self, prompts: list[Any]) -> Any:
        return self.routing.run_rollout(partial(super()._generate, prompts))  # type: ignore[misc]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **options: Any) -> Any:
        sample = partial(super()._generate_single_turn, prompt_ids, *args, **options)  # type: ignore[misc]
        return self.routing.capture.capture_turn(sample, prompt_ids)

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        generate = partial(super()._generate_and_score_completions, inputs)  # type: ignore[misc]
        return self.routing.run_generation(generate) if self.model.training else generate()

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **options: Any,
    ) -> Any:
        compute = partial(super()._get_per_token_logps_and_entropies, model)  # type: ignore[misc]
        return self.routing.run_pass(
            compute, model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, options=options
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        compute = partial(super()._compute_loss, model, inputs)  # type: ignore[misc]
        return self.routing.run_update(compute, inputs) if self.model.training else compute()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step of TRL. Raises `ReplayError` when no pass of the policy was replayed in it."""
        with self.routing.training_step():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

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


def require_mode(replay: str) -> None:
    """Raise `ConfigError` for a mode that does not exist."""
    require_choice("replay", replay, Replay)


def require_supported(trainer: Any, replay: Replay) -> None:
    """Raise `ConfigError` naming all settings of a trainer, set up by TRL, that replay does not go with."""
    refuse("", [*_refusals(trainer, replay), *(refusals(trainer) if replay == "R3" else ())])


def _refusals(trainer: Any, replay: Replay) -> Refusals:
    args, captures = trainer.args, replay != "R2"
    generates = captures and not trainer.use_vllm and trainer.rollout_func is None
    beams = generates and (trainer.generation_config.num_beams or trainer.model.generation_config.num_beams or 1)
    paged = "use_transformers_continuous_batching"
    if not hasattr(trainer, paged):  # before TRL 1.7
        paged = "use_transformers_paged"
    serves = captures and trainer.use_vllm and trainer.rollout_func is None and trainer.vllm_mode == "server"
    headless = not hasattr(utils, "add_fused_lm_head")
    newer = "{} is not replayed before TRL {}; install a newer one, or do without".format
    turns = captures and bool(trainer.tools) and not isinstance(trainer.rollout_func, EngineSource)
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    prompt_learning = is_peft_model(trainer.model) and any(
        config.is_prompt_learning for config in trainer.model.peft_config.values()
    )
    return [
        (
            fsdp is not None and getattr(fsdp, "fsdp_version", 1) == 1,
            "accelerate runs FSDP1 on GPUs alone, where replay under TRL was never tested; set fsdp_version: 2 in the "
            "configuration of accelerate, or take DeepSpeed",
        ),
        (
            replay != "none" and args.torch_compile_backend == "eager" and args.gradient_checkpointing,
            "torch_compile_backend 'eager' cannot recompute what was replayed; take 'inductor' or 'aot_eager', or set "
            "gradient_checkpointing=False",
        ),
        # older releases have a server of their own, a loss of Liger, and log-probs from all logits
        (serves and not hasattr(VLLMClient, "_post"), newer("vllm_mode='server'", "1.11")),
        (headless and args.use_liger_kernel, newer("use_liger_kernel", "1.15")),
        (headless and replay == "R3" and cuts_of(trainer), newer("sampling by top_p, top_k or min_p", "1.15")),
        (
            prompt_learning,
            "PEFT's prompt and prefix tuning put positions before the sequence that are no tokens, so that routes and "
            "batch cannot be checked to belong together; use LoRA",
        ),
        (
            beams > 1,
            f"num_beams is {beams}, and beams change their places after they were routed; sample with num_beams=1, or "
            "take replay='R2'",
        ),
        (
            generates and getattr(trainer, paged),
            f"{paged} generates over paged batches, whose routes cannot be recorded; leave it off, sample with vLLM or "
            "a rollout_func, or take replay='R2'",
        ),
        (
            turns and trainer.rollout_func is not None,
            "TRL samples what follows a tool's answer with its own engine, not with the rollout_func; call the tools "
            "in the rollout_func and return env_mask, or take rollout_with(engine)",
        ),
        (
            turns
            and trainer.use_vllm
            and trainer.accelerator.num_processes > 1
            and (trainer.vllm_mode == "server" or trainer.vllm_tensor_parallel_size > 1),
            "TRL deals the answers of a vLLM that serves several processes out in equal shares, and with tools the "
            "processes ask for unequal numbers; take vllm_mode='colocate' with a tensor_parallel_size of 1",
        ),
    ]
