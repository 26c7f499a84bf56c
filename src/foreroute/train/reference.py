"""The policy as it was when RL began, which a penalty can hold the trained one close to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters import hf
from foreroute.capture import Generation
from foreroute.errors import RunFolderError
from foreroute.train.config import TrainConfig
from foreroute.train.forward import sampled_logprobs
from foreroute.train.model import make_model
from foreroute.train.run_folder import RunFolder, misfit_named
from foreroute.train.schedule import Stage
from foreroute.train.tasks import Task


class Reference:
    """A frozen model. It routes for itself: neither the rollout's routes nor the policy's are replayed on it."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def logprobs_R(self, generation: Generation, stage: Stage, temperature: float) -> NDArray[np.float32]:
        """float32 [R], of the response tokens of all sequences, which `stage` deals, in their order."""
        parts = [sampled_logprobs(self._model, generation.select(part), temperature) for part in stage.micro_steps]
        return stage.in_order([part.cpu().numpy() for part in parts], generation.response_lengths)


def load_reference(config: TrainConfig, task: Task, run: RunFolder, device: torch.device) -> Reference:
    """The reference of a run, new or resumed: the weights of its first checkpoint.

    Raises:
        RunFolderError: when that is gone or damaged.
    """
    first = run.path / "checkpoints" / "step-000000.safetensors"
    if not first.exists():
        raise RunFolderError(
            f"{first} does not exist; rl.kl_coefficient needs the weights that the run began with. Restore the file"
        )
    model = make_model(config.model, task, seed=0, device=device)
    weights = run.load(first).state["model"]
    with misfit_named(f"checkpoint {first}"):
        model.load_state_dict(hf.without_lora(weights))
    return Reference(model)
