"""What the trainer asks of whatever samples, and the engine that a configuration asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters import hf, vllm
from foreroute.capture import Generation, Sampling
from foreroute.train.config import TrainConfig


def make_engine(run: TrainConfig, policy: hf.RoutedModel) -> Engine:
    """Start or reach the engine; the caller closes it.

    Raises:
        EngineError: when there is no vLLM to run, or its server does not answer.
    """
    config = run.rollout
    place = config.vllm
    if config.engine == "embedded":
        return hf.EmbeddedEngine(policy.model, config.precision, gate_weights=run.rl.routing == "R3+weights")
    if place.mode == "process":
        settings = vllm.ProcessSettings(
            python=Path(place.python),
            precision=config.precision,
            max_model_len=place.max_model_len,
            timeout_s=place.timeout_s,
            options=place.options,
        )
        return vllm.ProcessEngine(policy, settings)
    # TrainConfig refuses a server without url and folder
    url, folder = str(place.url), Path(str(place.weights_folder))
    return vllm.ServerEngine(policy, url, weights_folder=folder, timeout_s=place.timeout_s)


class Engine(Protocol):
    """The embedded engine, or one that runs elsewhere."""

    weight_version: int

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over the trainer's weights; what follows is stamped with `version`."""

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt, grouped by prompt."""

    def close(self) -> None:
        """End what was started to sample. May be called again."""
