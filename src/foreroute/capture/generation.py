"""The sampling that a rollout engine is asked for, and the generation it returns, also on disk.

A generation on disk is a trace file that has the log-probs of sampled tokens too. What reads traces reads its trace.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import MOST_INT32, as_array, as_numbers, check_number, whole_number
from foreroute.errors import ConfigError, TraceContentError, TraceFileError, shown
from foreroute.mismatch.measures import MOST_LOGPROB
from foreroute.trace import RoutingTrace, concatenate
from foreroute.trace.checks import place_of
from foreroute.trace.file import FORMAT, encode, read_trace


@dataclass(frozen=True)
class Sampling:
    """Settings that responses are sampled by, in every engine.

    Attributes:
        max_new_tokens: a response ends here unless `end_token` came first.
        end_token: ends a response and is part of it; -1 for none.
        group_size: responses per prompt.
        temperature: divides the logits; log-probs are those of the distribution sampled from. 0 takes the most probable
            token each time; log-probs are then those of the undivided logits, or 0 from a vLLM with sampling masks.
        top_k: the most probable tokens that are left to draw from, and all that are as probable as the last; 0 for all.
        top_p: then the fewest tokens that have this much of the probability left are kept.
        min_p: before both, tokens of less than this part of the highest probability are left out.
    """

    max_new_tokens: int
    end_token: int
    group_size: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("end_token", -1), ("group_size", 1), ("top_k", 0)):
            value = whole_number(getattr(self, name), name=name, least=least, most=MOST_INT32, error=ConfigError)
            object.__setattr__(self, name, value)
        check_number(self.top_p, name="top_p", most=1, error=ConfigError)
        for name, below in (("temperature", math.inf), ("min_p", 1)):
            check_number(getattr(self, name), name=name, below=below, error=ConfigError)
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if self.truncates and not self.temperature:
            raise ConfigError("a temperature of 0 takes the most probable token; leave top_k, top_p and min_p out")

    @property
    def truncates(self) -> bool:
        """Say whether tokens may be left out; a generation then has sampling masks."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, eq=False)
class Generation:
    """S sampled sequences.

        prompt  sampled … sampled  [tool … tool  sampled … sampled  …]

    A response is what was sampled. The text of tools between two turns of it has tokens and routes like the prompt, and
    neither log-probs nor a part in the loss.

    Attributes:
        trace: all tokens of each sequence, and their routes.
        prompt_lengths: int64 [S], tokens before the first sampled one.
        logprobs_R: float32 [R], log-probability of each sampled token in the engine, sequence after sequence; finite,
            and `MOST_LOGPROB` at most.
        sampled_N: bool [N], which tokens of the trace were sampled. Without it, all behind the prompts.
    """

    trace: RoutingTrace
    prompt_lengths: NDArray[np.int64]
    logprobs_R: NDArray[np.float32]
    sampled_N: NDArray[np.bool_] = field(default=None)  # type: ignore[arg-type]  # filled in below

    def __post_init__(self) -> None:
        if not isinstance(cast(Any, self.trace), RoutingTrace):
            raise TraceContentError(f"the trace is {shown(self.trace)}; expected a RoutingTrace")
        lengths = self.trace.lengths
        prompts = as_array(self.prompt_lengths, name="prompt_lengths")
        whole = prompts.shape == (len(self.trace),) and (prompts.dtype.kind in "iu" or not prompts.size)
        if not whole or (prompts < 1).any() or (prompts >= lengths).any():
            raise TraceContentError(
                f"{len(self.trace)} sequences of lengths {self.trace.lengths.tolist()[:8]} have prompts of lengths "
                f"{prompts.reshape(-1)[:8].tolist()}; expected whole numbers, a prompt and a response of at least one "
                "token each"
            )
        object.__setattr__(self, "prompt_lengths", prompts.astype(np.int64, copy=False))
        behind_prompts_N = self.trace.positions_N >= np.repeat(prompts, lengths)
        if cast(Any, self.sampled_N) is None:
            object.__setattr__(self, "sampled_N", behind_prompts_N)
        else:
            self._check_sampled(behind_prompts_N)
        self._check_logprobs()

    def __len__(self) -> int:
        """S, the number of sequences."""
        return len(self.trace)

    def __repr__(self) -> str:
        return f"Generation({len(self.logprobs_R)} sampled tokens of {self.trace})"

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """int64 [S], sampled tokens per sequence."""
        return np.add.reduceat(self.sampled_N.astype(np.int64), self.trace.offsets[:-1])

    @property
    def targets_N(self) -> NDArray[np.bool_]:
        """Mark where the token behind was sampled, for all tokens but the last of each sequence: bool [N - S]."""
        is_first_N = np.zeros(len(self.sampled_N), np.bool_)
        is_first_N[self.trace.offsets[:-1]] = True
        return self.sampled_N[~is_first_N]

    def response(self, sequence: int) -> NDArray[np.int32]:
        """Return the sampled tokens of one sequence, int32 [T]."""
        return self.trace.tokens(sequence)[self._sampled(sequence)]

    def select(self, sequences: ArrayLike) -> Generation:
        """Return the given sequences, in the given order."""
        chosen = as_numbers(sequences, name="sequences", below=len(self))
        parts = np.split(self.logprobs_R, np.cumsum(self.response_lengths)[:-1])
        logprobs = [parts[int(s)] for s in chosen]
        return Generation(
            self.trace.select(chosen),
            self.prompt_lengths[chosen],
            np.concatenate([*logprobs, np.zeros(0, np.float32)]),
            np.concatenate([*[self._sampled(int(s)) for s in chosen], np.zeros(0, np.bool_)]),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Generation]) -> Generation:
        """Join all sequences of the parts, in order."""
        return cls(
            concatenate([part.trace for part in parts]),
            np.concatenate([part.prompt_lengths for part in parts]),
            np.concatenate([part.logprobs_R for part in parts]),
            np.concatenate([part.sampled_N for part in parts]),
        )

    def _sampled(self, sequence: int) -> NDArray[np.bool_]:
        """Say which tokens of one sequence were sampled, bool [T]."""
        start, end = self.trace.offsets[sequence : sequence + 2]
        return self.sampled_N[int(start) : int(end)]

    def _check_logprobs(self) -> None:
        """Refuse log-probs that cannot be those of the sampled tokens."""
        given: Any = self.logprobs_R
        expected = (int(self.sampled_N.sum()),)
        plain = isinstance(given, np.ndarray) and not np.ma.is_masked(given)
        if not plain or given.dtype.kind != "f" or given.shape != expected:
            raise TraceContentError(
                f"got log-probs {shown(given)}, {_kind(given)}; expected an array of numpy, floats [{expected[0]}], "
                "one for each sampled token, sequence after sequence"
            )
        possible_R = np.isfinite(given) & (given <= MOST_LOGPROB)
        if not possible_R.all():
            first = int(possible_R.argmin())
            raise TraceContentError(
                f"log-probs hold {given[first]} for sampled token {first}; expected finite numbers up to 0, the "
                "natural logarithms of probabilities. Look at what the engine returns"
            )

    def _check_sampled(self, behind_prompts_N: NDArray[np.bool_]) -> None:
        """Refuse sampled tokens that do not begin behind the prompt and end with the sequence."""
        sampled_N: Any = self.sampled_N
        plain = isinstance(sampled_N, np.ndarray) and not np.ma.is_masked(sampled_N)
        if not plain or sampled_N.dtype != np.bool_ or sampled_N.shape != behind_prompts_N.shape:
            raise TraceContentError(
                f"the sampled tokens are given as {shown(sampled_N)}, {_kind(sampled_N)}; expected an array of numpy, "
                f"bool {behind_prompts_N.shape}, one for each token of the trace"
            )
        must_be_N = np.zeros_like(sampled_N)
        must_be_N[self.trace.offsets[:-1] + self.prompt_lengths] = True
        must_be_N[self.trace.offsets[1:] - 1] = True
        wrong = np.flatnonzero((sampled_N & ~behind_prompts_N) | (must_be_N & ~sampled_N))
        if len(wrong):
            sequence, position = place_of(wrong[0], self.trace.offsets)
            raise TraceContentError(
                f"token {position} of sequence {sequence}, whose prompt has "
                f"{int(self.prompt_lengths[sequence])}, is {'' if sampled_N[wrong[0]] else 'not '}said to be sampled; "
                "expected that no token of a prompt is, and the first behind it and the last of a sequence are"
            )


def _kind(given: Any) -> str:
    return f"{given.dtype} of shape {given.shape}" if isinstance(given, np.ndarray) else f"a {type(given).__name__}"


def save_generation(generation: Generation, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path | str:
    """Write a generation to `path`, as `foreroute.save` writes its trace, in pick order: the whole file or nothing.

    Raises:
        TraceFileError: when `path` exists and `overwrite` is False, or cannot be written: what was there is whole.
        TraceContentError: as `foreroute.save`.
    """
    metadata, tensors = encode(generation.trace, "ordered")
    tensors |= {
        "prompt_lengths": np.asarray(generation.prompt_lengths, np.int64),
        "sampled": generation.sampled_N,
        "logprobs": np.asarray(generation.logprobs_R, np.float32),
    }
    return FORMAT.write(path, metadata, tensors, overwrite=overwrite)


def load_generation(path: str | os.PathLike[str]) -> Generation:
    """Read a generation; `foreroute.load` reads its trace alone, in part too.

    Raises:
        TraceFileError: when the file is missing, damaged or no generation.
        TraceContentError: when log-probs and sequences do not fit together.
    """
    trace, tensors = read_trace(path)
    if "logprobs" not in tensors:
        raise TraceFileError(f"{path} is a trace without log-probs; capture.save_generation writes generations")
    return Generation(trace, tensors["prompt_lengths"], tensors["logprobs"], tensors["sampled"])


def is_generation(path: str | os.PathLike[str]) -> bool:
    """Say whether a file has log-probs beside a trace, by its header."""
    try:
        with FORMAT.open(path) as file:
            return "logprobs" in file.tensors
    except TraceFileError:
        return False
