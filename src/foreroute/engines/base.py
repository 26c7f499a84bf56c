"""The door of every engine, and what engines outside the trainer's process share: weights, requests and responses.

Responses are checked against their requests before they are decoded.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import CheckpointWriter, ServedModel, Weights
from foreroute.capture import Generation, Sampling, decode
from foreroute.capture.logprobs import NO_LOGPROB
from foreroute.checks import MOST_INT32
from foreroute.errors import ConfigError, EngineError
from foreroute.files.regular import as_path
from foreroute.files.writing import writing_named
from foreroute.mismatch.measures import MOST_LOGPROB
from foreroute.trace import NO_VERSION, RoutingTrace, concatenate

ANSWER_BYTES, LOGPROB_BYTES = 1 << 20, 512
"""Bounds of the bytes of an answer without tokens, and of a sampled token without its routes."""
SUBFOLDER = "foreroute-weights"
REASONS = ("stop", "length", "abort")


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


@dataclass(frozen=True, eq=False)
class Request:
    """One response that an engine is asked for."""

    id: str
    prompt: NDArray[np.int32]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, eq=False)
class Response:
    """An engine's answer to a request, before it is checked."""

    tokens: NDArray[np.int32]  # the sampled ones
    logprobs: NDArray[np.float32]
    logprob_tokens: NDArray[np.int32]  # the tokens that `logprobs` are of
    reason: str  # why it ended, one of `REASONS`
    output: dict[str, Any]  # routes, sampling masks and spans of weights, named as `capture.decode` reads them
    states_versions: bool  # whether the engine says which weights sampled each token

    def to_trace(self, request: Request, model: ServedModel, *, loaded: Sequence[int]) -> RoutingTrace:
        """Check the response against its request and the versions of weights that are `loaded`, and decode it."""
        self._check_tokens(request, model.vocabulary_size)
        self._check_logprobs()
        trace = decode(
            self.output,
            model=model.spec,
            token_ids=np.concatenate([request.prompt, self.tokens]),
            # where the engine states no version, it is that of the weights loaded last
            weight_version=_parse_version if self.states_versions else loaded[-1] if loaded else NO_VERSION,
            vocabulary_size=model.vocabulary_size,
            indexers=model.indexers,
        )
        # row p gives the logits of token p + 1, and the last token's row was never computed
        sampled = trace.weight_versions_N[len(request.prompt) - 1 : -1]
        check_versions({*map(str, sampled)}, loaded)
        if self.states_versions and (sampled == sampled[0]).all():
            # weights that did not change while the response was sampled have computed its prompt too
            return trace.with_weight_version(int(sampled[0]))
        return trace

    def _check_tokens(self, request: Request, vocabulary_size: int | None) -> None:
        tokens, count, end = self.tokens, len(self.tokens), request.sampling.end_token
        limit = request.sampling.max_new_tokens
        unknown = tokens[(tokens < 0) | (tokens >= (vocabulary_size or np.inf))]
        ends = np.flatnonzero(tokens == end)
        if self.reason == "abort":
            # as a whole response it would be trained on as if it ended here
            wrong = "aborted a response: someone else uses the engine, which only this trainer may"
        elif not 1 <= count <= limit:
            wrong = f"sampled {count} tokens, it was asked for 1 to {limit}"
        elif len(unknown):
            wrong = (
                f"sampled token {unknown[0]}, the policy knows those below {vocabulary_size}: the engine runs another "
                "model or vocabulary. Start it on the trainer's checkpoint"
            )
        elif self.reason not in REASONS:
            wrong = f"ended a response for the reason {self.reason!r:.40}; expected {REASONS}"
        elif len(ends) and ends[0] != count - 1:
            wrong = f"sampled {count - 1 - ends[0]} tokens behind the end token {end}; it must stop there"
        elif self.reason == "stop" and not len(ends):
            wrong = (
                f"says that a response ended by an end token, and its last token is {tokens[-1]}, not {end}: it stops "
                "at others too. Look at eos_token_id of the checkpoint it serves"
            )
        elif self.reason == "length" and count != limit:
            wrong = (
                f"ended a response for its length after {count} of {limit} tokens; give it room for prompt and "
                "response, or sample fewer"
            )
        else:
            return
        raise EngineError(f"the engine {wrong}")

    def _check_logprobs(self) -> None:
        check_echo("the token of each log-prob", self.tokens, self.logprob_tokens)
        if len(self.logprobs) != len(self.tokens):
            raise EngineError(f"the engine returned {len(self.logprobs)} log-probs for {len(self.tokens)} tokens")
        possible = (self.logprobs > NO_LOGPROB) & (self.logprobs <= MOST_LOGPROB)  # False for NaN
        if not possible.all():
            raise EngineError(
                f"the engine returned the log-prob {self.logprobs[int(possible.argmin())]}, which is no logarithm of "
                "a probability; its weights may be damaged"
            )


def count_tokens(prompts: Sequence[NDArray[np.int32]]) -> list[int]:
    """Return the length of each prompt; raise `ConfigError` without one, for one array of all, or without a token."""
    if getattr(prompts, "ndim", 1) > 1:  # whose rows were padded to one length
        raise ConfigError(
            f"prompts is one array {list(prompts.shape)}; expected a list with the tokens of each prompt, without "  # type: ignore[attr-defined]
            "padding: [row[mask == 1] for row, mask in zip(input_ids, attention_mask)]"
        )
    lengths = [len(prompt) for prompt in prompts]
    # the first sampled token comes from the row of the prompt's last
    if not lengths or not all(lengths):
        raise ConfigError(
            f"there are {len(lengths)} prompts, of {lengths[:8]} tokens; expected one or more, of one token or more"
        )
    return lengths


def check_echo(what: str, sent: NDArray[np.int32], echoed: NDArray[np.int32]) -> None:
    """Raise `EngineError` when an engine states other tokens than it was sent, or than it sampled."""
    if not np.array_equal(sent, echoed):
        raise EngineError(
            f"the engine says that {what} was {echoed[:8].tolist()}..., expected {sent[:8].tolist()}...: it answers "
            "another request, or puts tokens through a tokenizer or template of its own. Start it on the trainer's "
            "checkpoint, with nothing between"
        )


def check_versions(stated: set[str], loaded: Sequence[int]) -> None:
    """Raise `EngineError` when an engine that was given weights states other versions than those of `loaded`."""
    if loaded and (others := stated - {*map(str, loaded)}):
        raise EngineError(
            f"the engine sampled with weights of version {', '.join(sorted(others)):.80}, the trainer loaded version "
            f"{', '.join(map(str, loaded))}; no one else may change the weights of an engine that a trainer uses"
        )


def _parse_version(name: str) -> int:
    """Return the number that a version of weights is, or `NO_VERSION` for a name such as "default"."""
    return int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else NO_VERSION
