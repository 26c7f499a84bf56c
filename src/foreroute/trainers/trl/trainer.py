"""TRL's trainer with routing replay: what is overridden, and nothing else. The work is done in `passes.py`.

TRL sends old, reference and current log-probs through one method, shuffles and splits whatever tensors a generation
batch holds, and has a public door for other rollout engines. Replay stands at those three places:

    _generate                                  the rollout's routes are captured
    _generate_and_score_completions            each sequence gets its row number, which TRL then shuffles and splits
    _get_per_token_logps_and_entropies         replayed in old and update passes of the policy, in no other
    _compute_loss, training_step, log          the update, the proof that it was replayed, and the metrics
"""

from __future__ import annotations

from functools import partial
from typing import Any

import trl
from torch import Tensor

from foreroute.trainers.trl.hooks import require_hooks
from foreroute.trainers.trl.passes import Replay, TrainerPasses
from foreroute.trainers.trl.refusals import require_mode, require_supported
from foreroute.trainers.trl.vllm_tap import colocated_vllm_returns_routes


class RoutingReplay:
    """Routing replay for TRL's `GRPOTrainer` and trainers derived from it; put it first among the bases.

        class MyTrainer(RoutingReplay, MyGRPOTrainer): ...

    Args:
        *args: what the trainer takes.
        replay: "R3", the rollout's routes in the old-log-prob and update passes; "R2", those of the old-log-prob pass
            in the update passes; "none", no replay, but the same metrics.
        **kwargs: what the trainer takes.

    Attributes:
        routing: what is replayed in which pass.

    Raises:
        AttachError: when this release of TRL has no longer what replay stands on, or the model is not replayable.
        ConfigError: for settings under which replay is not supported or would have no effect.
    """

    # TRL's trainer defines these; a mixin only sees them at run time
    model: Any
    accelerator: Any

    def __init__(self, *args: Any, replay: Replay = "R3", **kwargs: Any) -> None:
        require_hooks(type(self))
        require_mode(replay)
        with colocated_vllm_returns_routes(wanted=replay != "R2"):
            super().__init__(*args, **kwargs)
        require_supported(self, replay)
        self.routing = TrainerPasses(self, replay)

    def _generate(self, prompts: list[Any]) -> Any:
        generate = partial(super()._generate, prompts)  # type: ignore[misc]
        return self.routing.capture(generate) if self.model.training else generate()

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        generate = partial(super()._generate_and_score_completions, inputs)  # type: ignore[misc]
        return self.routing.generate(generate) if self.model.training else generate()

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
        return self.routing.log_probs(
            compute, model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, options=options
        )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        compute = partial(super()._compute_loss, model, inputs)  # type: ignore[misc]
        return self.routing.update(compute, inputs) if self.model.training else compute()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """A training step of TRL, in which a pass of the policy was replayed.

        Raises:
            ReplayError: when none was.
        """
        with self.routing.step():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's logs, with the mismatch since the last training log."""
        if self.model.training:
            logs.update(self.routing.metrics.flush())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class GRPOTrainer(RoutingReplay, trl.GRPOTrainer):
    """`trl.GRPOTrainer` with routing replay; see `RoutingReplay` for what it adds."""
