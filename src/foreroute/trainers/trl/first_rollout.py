"""The first rollout beside the trainer's own routes: a mix-up on the way is named before anything is trained."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from foreroute.adapters.hf import RoutedTransformer
from foreroute.trace import RoutingTrace
from foreroute.trainers.plausible import require_same_origin

MAX_SEQUENCES = 16


def require_plausible(trainer: Any, routed: RoutedTransformer, trace: RoutingTrace) -> None:
    """One forward of the policy on its own routes, on up to 16 sequences.

    The weights are those of the rollout, so that its routes are the policy's own up to numerics. Routes that stand at
    other positions, in other sequences or layers, or are physical ids, are seen here, and nowhere else once they are
    replayed.

    Args:
        trainer: TRL's.
        routed: the policy.
        trace: the rollout's.

    Raises:
        ReplayError: naming the mix-up that explains a difference.
    """
    part = trace.select(np.arange(min(len(trace), MAX_SEQUENCES)))
    tokens = [torch.from_numpy(part.tokens(s).astype(np.int64)) for s in range(len(part))]
    mask = pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True)
    ids, device = pad_sequence(tokens, batch_first=True), trainer.accelerator.device
    with (
        torch.no_grad(),
        torch.random.fork_rng(range(torch.cuda.device_count())),
        warnings.catch_warnings(),
        routed.record() as recording,
    ):
        # what torch says of reentrant checkpointing without gradients
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        trainer._get_per_token_logps_and_entropies(
            trainer.model,
            ids.to(device),
            mask.to(device),
            1,
            batch_size=trainer.args.per_device_train_batch_size,
        )
    require_same_origin(recording.trace(), part)
