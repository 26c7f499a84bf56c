"""The rollout engine that a configuration asks for, opened and closed with the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foreroute.adapters import hf, vllm
from foreroute.train.config import RolloutConfig
from foreroute.train.rollout import Engine


@contextmanager
def open_engine(config: RolloutConfig, policy: hf.RoutedModel) -> Iterator[Engine]:
    """Make the engine, and end whatever it started when the context is left.

    Raises:
        EngineError: when there is no vLLM to run, or its server does not answer.
    """
    place = config.vllm
    if config.engine == "embedded":
        yield hf.EmbeddedEngine(policy.model, config.precision)
    elif place.mode == "process":
        settings = vllm.ProcessSettings(
            python=Path(place.python),
            precision=config.precision,
            max_model_len=place.max_model_len,
            timeout_s=place.timeout_s,
            options=place.options,
        )
        with vllm.ProcessEngine(policy, settings) as engine:
            yield engine
    else:
        # TrainConfig refuses a server without url and folder
        url, folder = str(place.url), Path(str(place.weights_folder))
        yield vllm.ServerEngine(policy, url, weights_folder=folder, timeout_s=place.timeout_s)
