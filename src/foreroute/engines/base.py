"""What every engine does, and what those outside the trainer's process share: weights, and how they are asked."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from foreroute.adapters.checkpoint import ServedModel, Weights
from foreroute.capture import Generation, Sampling
from foreroute.capture.arrays import MAX_INT32
from foreroute.engines.sequences import PartialGeneration, Request, Response, lengths_of
from foreroute.engines.weights_folder import WeightsFolder
from foreroute.errors import ConfigError, EngineError, shown
from foreroute.trace import NO_VERSION, concatenate

SLACK_BYTES, BYTES_OF_LOGPROB = 1 << 20, 512
"""Bytes of an answer without tokens, and of a sampled token beside its routes, at most."""


class Engine(Protocol):
    """What samples: `embedded.EmbeddedEngine`, `vllm.VLLMEngine` and `sglang.SGLangServerEngine`."""

    weight_version: int

    def load_weights(self, weights: Weights, version: int) -> None:
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

    def _requests(
        self,
        prompts: Sequence[NDArray[np.int32]],
        sampling: Sampling,
        generator: torch.Generator,
        *,
        limits: ArrayLike | None = None,
        known_rows: ArrayLike = 0,
    ) -> list[Request]:
        """What is asked for: `sampling.group_size` responses to each prompt, grouped by prompt, each with a seed.

        Args:
            prompts: integer arrays [P].
            sampling: how.
            generator: the source of the seeds.
            limits: int [prompts], the most tokens that may be sampled; by default those of `sampling`.
            known_rows: int [prompts], or one for all: rows at the start of a prompt that are not wanted.

        Raises:
            ConfigError: without a prompt, for one without a token, whose row gives the first sampled one, and for known
                rows that are not fewer than the prompt's tokens: vLLM 0.28 ends where it is asked for none of them.
            EngineError: when it is not known which weights the engine has.
        """
        lengths = lengths_of(prompts)
        known = np.asarray(known_rows)
        fits = known.dtype.kind in "iu" and known.shape in ((), (len(lengths),))
        if not fits or (known < 0).any() or (known >= lengths).any():
            raise ConfigError(
                f"known_rows are {shown(known_rows)}; expected a whole number, or one for each prompt, of 0 or more "
                "and fewer than its tokens: the last row gives the first sampled token"
            )
        if self._half_loaded:
            raise EngineError(
                "the engine's weights are unknown, since loading the last ones failed half way; call load_weights again"
            )
        limited = np.broadcast_to(sampling.max_new_tokens if limits is None else limits, len(lengths))
        of_prompt = zip(prompts, limited.tolist(), np.broadcast_to(known, len(lengths)).tolist(), strict=True)
        asked = [each for each in of_prompt for _ in range(sampling.group_size)]
        seeds, name = torch.randint(1 << 31, (len(asked),), generator=generator).tolist(), secrets.token_hex(8)
        return [
            Request(f"{name}-{number}", prompt, sampling, limit, seed, start)
            for number, ((prompt, limit, start), seed) in enumerate(zip(asked, seeds, strict=True))
        ]

    def _generated(
        self, requests: Sequence[Request], responses: Sequence[Response], loaded: Sequence[int]
    ) -> PartialGeneration:
        """What was sampled, by weights of one of these versions; see `Response.trace`."""
        pairs = zip(requests, responses, strict=True)
        trace = concatenate(got.trace(asked, self._served, loaded=loaded) for asked, got in pairs)
        return PartialGeneration(
            trace.with_provenance(engine=self._name, engine_version=self._engine_version),
            np.array([len(request.prompt) for request in requests], np.int64),
            [response.logprobs for response in responses],
            np.array([response.reason != "abort" for response in responses]),
        )

    def _most_bytes(self, requests: Sequence[Request], *, most_kept: int = 0) -> int:
        """The most bytes that an answer in JSON may have: base64 of ids for each token, log-probs, tokens of masks.

        Args:
            requests: of which it answers any.
            most_kept: tokens of the set that a sampled one was drawn from, where these come too.
        """
        spec, indexers = self._served.spec, self._served.indexers
        ids = (max(layer.index for layer in spec.layers) + 1) * spec.top_k
        if indexers is not None:
            ids += (max(layer.index for layer in indexers.layers) + 1) * indexers.top_k
        tokens, sampled = max(len(each.prompt) + each.limit for each in requests), max(r.limit for r in requests)
        # four bytes of an id are 5.3 letters; layers of drafts may come behind the decoder's
        return SLACK_BYTES + tokens * (12 * ids + 16) + sampled * (BYTES_OF_LOGPROB + 12 * most_kept)

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


def stop_token_ids(sampling: Sampling) -> list[int]:
    """The tokens that end a response; vLLM refuses numbers outside of its vocabulary, such as -1 for none."""
    return [sampling.end_token] if sampling.end_token >= 0 else []
