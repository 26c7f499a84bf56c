"""Log-probs of sampled tokens, as engines state them beside routes.

vllm    completions: `logprobs.token_logprobs`; chat and /inference/v1/generate: `logprobs.content[i].logprob`; in
        process: `logprobs[i][token].logprob`
sglang  `meta_info.output_token_logprobs`, entries of log-prob and token; `output_token_sampling_logprobs` where tokens
        were drawn from a truncated distribution; OpenAI's endpoints as vLLM's
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arrays import field_of, items_of
from foreroute.capture.recognition import RawSequence
from foreroute.errors import CaptureError, shown

NO_LOGPROB = -9999.0
"""Value that vLLM writes for a log-prob that is missing or not finite."""


def read_logprobs(raw: RawSequence, tokens_T: NDArray[np.int32], what: str) -> NDArray[np.float32]:
    """Return the log-probs of the sampled tokens of one answer, float32 [R]; `tokens_T` are of prompt and response."""
    sampled = tokens_T[_prompt_length(raw, len(tokens_T), what) :].tolist()
    stated = [] if raw.logprobs is None else _entries(raw.logprobs)
    if len(stated) != len(sampled) or not sampled:
        raise CaptureError(
            f"{what} has {len(stated)} log-probs for {len(sampled)} sampled tokens; expected one for each. Ask the "
            "engine for log-probs of sampled tokens alone (vLLM: logprobs=0 without echo; SGLang: return_logprob)"
        )
    found = [_logprob(entry, token, what) for entry, token in zip(stated, sampled, strict=True)]
    for token, value in zip(sampled, found, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or value <= NO_LOGPROB:
            raise CaptureError(f"{what} states the log-prob {shown(value)} of token {token}; expected a finite number")
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused as no log-prob
        return np.array(found, np.float64).astype(np.float32)


def _prompt_length(raw: RawSequence, num_tokens: int, what: str) -> int:
    """Count the tokens before the first sampled one."""
    if raw.prompt_token_ids is not None:
        return len(items_of(raw.prompt_token_ids, "the prompt"))
    if raw.response_token_ids is not None:
        return num_tokens - len(items_of(raw.response_token_ids, "the response"))
    raise CaptureError(
        f"{what} does not tell prompt and response apart, so that its log-probs have no place; decode its routes, and "
        "make a Generation of the trace, the lengths of its prompts and the log-probs"
    )


def _entries(logprobs: Any) -> list[Any]:
    """List what is stated, one entry for each token."""
    for name in ("token_logprobs", "content"):
        if not isinstance(logprobs, list | tuple) and (listed := field_of(logprobs, name)) is not None:
            return items_of(listed, f"the {name}")
    return items_of(logprobs, "the log-probs")


def _logprob(entry: Any, token: int, what: str) -> Any:
    """Find the log-prob of a sampled token in what is stated of its step."""
    if isinstance(entry, list | tuple):  # of SGLang: log-prob, token, text
        pair = [*entry, None, None][:2]
        if pair[1] is not None and pair[1] != token:
            raise CaptureError(f"{what} has a log-prob of token {shown(pair[1])} where {token} was sampled")
        return pair[0]
    if isinstance(entry, Mapping) and "logprob" not in entry:  # of vLLM in process: every token that was asked for
        if token not in entry:
            raise CaptureError(f"{what} has log-probs of {shown([*entry])} where token {token} was sampled")
        entry = entry[token]
    return entry if isinstance(entry, int | float | np.floating) else field_of(entry, "logprob")
