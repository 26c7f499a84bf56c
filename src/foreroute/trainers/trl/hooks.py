"""What this adapter stands on in TRL, checked against the release at hand."""

from __future__ import annotations

import inspect

import trl

from foreroute.adapters.versions import PEERS
from foreroute.errors import AttachError

HOOKS = {
    # method of GRPOTrainer: parameters that are passed to it, or read from it, by name or place
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
    "_compute_loss": ("model", "inputs"),
    "_tokenize_prompts": ("prompts",),
    "training_step": (),
    "log": ("logs",),
}


def require_hooks(trainer: type) -> None:
    """Raise `AttachError` unless the trainer's bases have the methods that are overridden, with these parameters.

    Args:
        trainer: a class derived from TRL's `GRPOTrainer`.
    """
    if not issubclass(trainer, trl.GRPOTrainer):
        raise AttachError(
            f"{trainer.__name__} is not derived from trl.GRPOTrainer; write class {trainer.__name__}(RoutingReplay, "
            "trl.GRPOTrainer)"
        )
    for name, wanted in HOOKS.items():
        method = getattr(trl.GRPOTrainer, name, None)
        seen = [] if method is None else list(inspect.signature(method).parameters)
        missing = [parameter for parameter in wanted if parameter not in seen]
        if method is None or missing:
            what = f"no {name}" if method is None else f"{name} without {', '.join(missing)}"
            raise AttachError(
                f"TRL {trl.__version__} has {what}, which routing replay stands on; this foreroute was tested with "
                f"TRL {PEERS['trl'].newest}. Install that, or a newer foreroute"
            )
