"""The door of every engine, and what engines outside the trainer's process share: weights, requests and responses."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import CheckpointWriter, ServedModel, Weights
from foreroute.capture import Generation, Sampling
from foreroute.checks import MOST_INT32
from foreroute.engines.sequences import Request, Response, count_tokens
from foreroute.errors import ConfigError, EngineError
from foreroute.files.regular import as_path
from foreroute.files.writing import writing_named
from foreroute.trace import NO_VERSION, concatenate

ANSWER_BYTES, LOGPROB_BYTES = 1 << 20, 512
"""Bounds of the bytes of an answer without tokens, and of a sampled token without its routes."""
SUBFOLDER = "foreroute-weights"


class Engine(Protocol):
    """Samples responses: `embedded.EmbeddedEngine`, `vllm.VLLMEngine` and `sglang.SGLangServerEngine`."""

    weight_version: int

    def load_weights(self, weights: Weights, version: int) -> None:
        """Load the trainer's weights; rows that are sampled from now on are stamped with `version`."""

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt, integers [T], grouped by prompt in their order."""

    def close(self) -> None:
        """End what was started to sample. May be called again."""


class OutsideEngine(ABC):
    """An engine that is sent weights through a folder."""

    weight_version: int
    _weights: WeightsFolder
    _engine_version = ""

    def __init__(self, model: ServedModel, name: str) -> None:
        if not isinstance(model, ServedModel):
            raise ConfigError(
                f"an engine outside the trainer serves a ServedModel, not a {type(model).__name__}; pass "
                "ServedModel.of(hf.attach(model)) or ServedModel.at(folder), from foreroute.adapters.checkpoint"
            )
        self.weight_version = NO_VERSION
        self._model, self._name = model, name
        self._loaded: list[int] = []
        self._is_half_loaded = False

    def load_weights(self, weights: Weights, version: int) -> None:
        """Load the trainer's weights, forget the prefix cache, and stamp rows that follow with `version`.

        Raises:
            ConfigError: when the checkpoint cannot be written, or weights are missing.
            EngineError: when the engine fails. It samples nothing until weights are loaded again.
        """
        folder = self._weights.put(weights)
        # after an error below it is unknown which weights the engine has
        self._is_half_loaded = True
        self._load_checkpoint(str(folder), version)
        self.weight_version, self._is_half_loaded = version, False
        self._loaded.append(version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder of weights; a server of yours goes on. May be called again."""
        self._weights.close()

    @abstractmethod
    def _load_checkpoint(self, folder: str, version: int) -> None:
        """Have the engine load a checkpoint and forget its prefix cache."""

    def _make_requests(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> list[Request]:
        """Make `sampling.group_size` requests of each prompt, each with a seed of its own."""
        count_tokens(prompts)
        if self._is_half_loaded:
            raise EngineError(
                "the engine's weights are unknown, since loading the last ones failed half way; call load_weights again"
            )
        asked = [prompt for prompt in prompts for _ in range(sampling.group_size)]
        seeds, name = torch.randint(1 << 31, (len(asked),), generator=generator).tolist(), secrets.token_hex(8)
        return [
            Request(f"{name}-{number}", prompt, sampling, seed)
            for number, (prompt, seed) in enumerate(zip(asked, seeds, strict=True))
        ]

    def _to_generation(
        self, requests: Sequence[Request], responses: Sequence[Response], loaded: Sequence[int]
    ) -> Generation:
        """Check and join all responses, sampled by weights of one of the versions `loaded`."""
        pairs = zip(requests, responses, strict=True)
        trace = concatenate(response.to_trace(request, self._model, loaded=loaded) for request, response in pairs)
        return Generation(
            trace.with_provenance(engine=self._name, engine_version=self._engine_version),
            np.array([len(request.prompt) for request in requests], np.int64),
            np.concatenate([response.logprobs for response in responses]),
        )

    def _bound_answer(self, requests: Sequence[Request], *, most_kept: int = 0) -> int:
        """Bound the bytes of an answer to one request, where a sampling mask has at most `most_kept` tokens."""
        spec, indexers = self._model.spec, self._model.indexers
        # layers of drafts may follow the decoder's, so the highest index counts and not the number of layers
        ids = (max(layer.index for layer in spec.layers) + 1) * spec.top_k
        if indexers is not None:
            ids += (max(layer.index for layer in indexers.layers) + 1) * indexers.top_k
        sampled = requests[0].sampling.max_new_tokens
        tokens = max(len(each.prompt) for each in requests) + sampled
        # an id of 4 bytes takes 5.3 letters of base64; 12 leave room for ids of 8 bytes
        return ANSWER_BYTES + tokens * (12 * ids + 16) + sampled * (LOGPROB_BYTES + 12 * most_kept)

    def _truncation_params(self, sampling: Sampling, *, most: int = MOST_INT32) -> dict[str, float]:
        """Return temperature, top_k, top_p and min_p for an engine whose masks have at most `most` tokens."""
        # such engines need a top_k, which bounds a mask, and a temperature above 0, at which top_k = 1 is greedy
        is_greedy = sampling.temperature == 0
        top_k = 1 if is_greedy else sampling.top_k or self._model.vocabulary_size or most + 1
        if top_k > most:
            raise ConfigError(
                f"top_k is {sampling.top_k}, and masks may have {most} tokens of {self._model.vocabulary_size}; set "
                f"top_k to {most} at most"
            )
        temperature = 1.0 if is_greedy else sampling.temperature
        return {"temperature": temperature, "top_k": top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}


class WeightsFolder:
    """The folder `foreroute-weights` in one of the user's, locked by one trainer; nothing beside it is touched."""

    def __init__(self, path: Path, writer: CheckpointWriter) -> None:
        self._path, self._writer = as_path(path, ConfigError).absolute() / SUBFOLDER, writer
        with writing_named(self._path, ConfigError):
            self._path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        # called as a method, or when this object goes; the second call does nothing
        self.close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(f"{path} is in use by another trainer; give each a folder of its own") from error
        except OSError:
            pass  # a file system without locks

    def put(self, weights: Weights) -> Path:
        """Write a checkpoint in the place of the one before; return its absolute path."""
        # a name is never used again: an engine that is late reads this checkpoint or none, and never half of another
        folder = self._path / secrets.token_hex(4)
        with writing_named(self._path, ConfigError):
            for before in self._path.iterdir():
                shutil.rmtree(before)
            try:
                return self._writer.write(folder, weights)
            except BaseException:
                with suppress(OSError):
                    shutil.rmtree(folder)
                raise


def stop_token_ids(sampling: Sampling) -> list[int]:
    """Return the tokens that end a response: none for -1, which vLLM would refuse as outside of its vocabulary."""
    return [sampling.end_token] if sampling.end_token >= 0 else []
