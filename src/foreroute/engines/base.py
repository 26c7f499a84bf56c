"""What every engine does, and what those outside the trainer's process share: weights, and how they are asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel, Weights
from foreroute.capture import Generation, Sampling
from foreroute.capture.arrays import MAX_INT32
from foreroute.engines.sequences import Response, Sample
from foreroute.engines.weights_folder import WeightsFolder
from foreroute.errors import ConfigError, EngineError
from foreroute.trace import NO_VERSION

SLACK_BYTES, BYTES_OF_LOGPROB = 1 << 20, 512
"""Of an answer without tokens, and of what is said of a sampled one beside its routes."""


class Engine(Protocol):
    """What samples: `embedded.EmbeddedEngine`, and the engines of `engines.vllm` and `engines.sglang`."""

    weight_version: int

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over the trainer's weights; what follows is stamped with `version`."""

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt, grouped by prompt."""

    def close(self) -> None:
        """End what was started to sample. May be called again."""


class OutsideEngine(ABC):
    """An engine that is sent weights through a folder, and stamps what it samples with their version.

    Args:
        model: what it serves.
        name: what it is, for the provenance.

    Attributes:
        weight_version: the version last loaded; every row is stamped with it.
    """

    _weights: WeightsFolder
    _engine_version = ""

    def __init__(self, model: ServedModel, name: str) -> None:
        if not isinstance(model, ServedModel):
            raise ConfigError(
                f"an engine outside the trainer serves a ServedModel, not a {type(model).__name__}; pass "
                "ServedModel.of(hf.attach(model)) or ServedModel.at(folder), from foreroute.adapters.checkpoint"
            )
        self.weight_version = NO_VERSION
        self._served, self._name = model, name
        self._loaded: list[int] = []
        self._half_loaded = False

    def load_weights(self, weights: Weights, version: int) -> None:
        """Take over the trainer's weights, forget the prefix cache, and stamp what follows with `version`."""
        folder = self._weights.put(weights)
        self._half_loaded = True
        self._hand_over(str(folder), version)
        self.weight_version, self._half_loaded = version, False
        self._loaded.append(version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder of weights; a server of yours goes on. May be called again."""
        self._weights.close()

    @abstractmethod
    def _hand_over(self, folder: str, version: int) -> None:
        """Have the engine load a checkpoint, and forget its prefix cache."""

    def _sample_of(self, response: Response, sampling: Sampling, max_new_tokens: int) -> Sample:
        return response.sample(
            self._served,
            sampling,
            max_new_tokens=max_new_tokens,
            weight_version=self.weight_version,
            engine=self._name,
            engine_version=self._engine_version,
        )

    def _require_ready(self) -> None:
        """Raise `EngineError` when it is not known which weights the engine has."""
        if self._half_loaded:
            raise EngineError(
                "the engine's weights are unknown, since loading the last ones failed half way; call load_weights again"
            )

    def _cuts(self, sampling: Sampling, *, most: int = MAX_INT32) -> dict[str, float]:
        """Give temperature, top_k, top_p and min_p as engines that return masks take them.

        They need a top_k, which bounds a mask, and a temperature: that of all tokens, and 1 for the most probable one.

        Args:
            sampling: how to sample.
            most: ids that a mask may have.

        Raises:
            ConfigError: when a mask could have more.
        """
        greedy = sampling.temperature == 0
        top_k = 1 if greedy else sampling.top_k or self._served.vocabulary_size or most + 1
        if top_k > most:
            raise ConfigError(
                f"top_k is {sampling.top_k}, and masks may have {most} tokens of {self._served.vocabulary_size}; set "
                f"top_k to {most} at most"
            )
        temperature = 1.0 if greedy else sampling.temperature
        return {"temperature": temperature, "top_k": top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}


def most_bytes_of(model: ServedModel, tokens: int, sampled: int, *, most_kept: int = 0) -> int:
    """The most bytes that an answer in JSON may have: ids in base64 for each token, log-probs, and tokens of masks.

    Args:
        model: what is served.
        tokens: of prompts and responses.
        sampled: of these, how many at most are sampled.
        most_kept: tokens of the set that a sampled one was drawn from, where these come too.
    """
    spec, indexers = model.spec, model.indexers
    ids = (max(layer.index for layer in spec.layers) + 1) * spec.top_k
    if indexers is not None:
        ids += (max(layer.index for layer in indexers.layers) + 1) * indexers.top_k
    # four bytes of an id are 5.3 letters; layers of drafts may come behind the decoder's
    return SLACK_BYTES + tokens * (12 * ids + 16) + sampled * (BYTES_OF_LOGPROB + 12 * most_kept)


def require_prompts(prompts: Sequence[NDArray[np.int32]]) -> None:
    """Raise `ConfigError` unless there is a prompt, and each has a token, whose row gives the first sampled one.

    Args:
        prompts: integer arrays [P].
    """
    if not len(prompts) or not all(len(prompt) for prompt in prompts):
        raise ConfigError(
            f"there are {len(prompts)} prompts, of {[len(prompt) for prompt in prompts][:8]} tokens; expected one or "
            "more, of one token or more each"
        )


def draw_seeds(generator: torch.Generator, count: int) -> list[int]:
    """A seed for each request. Engines add the number of the response within its group."""
    seeds: list[int] = torch.randint(1 << 31, (count,), generator=generator).tolist()
    return seeds


def stop_token_ids(sampling: Sampling) -> list[int]:
    """The tokens that end a response; vLLM refuses numbers outside of its vocabulary, such as -1 for none."""
    return [sampling.end_token] if sampling.end_token >= 0 else []
