"""The engine that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import ServedModel
from foreroute.engines import vllm
from foreroute.engines.base import Engine
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.train.config import TrainConfig


def make_engine(run: TrainConfig, policy: hf.RoutedTransformer) -> Engine:
    """Start or reach the engine; the caller closes it.

    Raises:
        EngineError: when there is no vLLM to run, or its server does not answer.
    """
    config = run.rollout
    place = config.vllm
    if config.engine == "embedded":
        return EmbeddedEngine(policy.model, config.precision, gate_weights=run.rl.routing == "R3+weights")
    served = ServedModel.of(policy)
    if place.mode == "process":
        settings = vllm.ProcessSettings(
            python=Path(str(place.python)),  # TrainConfig refuses a process without
            precision=config.precision,
            max_model_len=place.max_model_len,
            timeout_s=place.timeout_s,
            options=place.options,
        )
        return vllm.ProcessEngine(served, settings)
    # TrainConfig refuses a server without url and folder
    url, folder = str(place.url), Path(str(place.weights_folder))
    return vllm.ServerEngine(served, url, weights_folder=folder, timeout_s=place.timeout_s)
