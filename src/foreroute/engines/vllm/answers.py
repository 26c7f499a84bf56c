"""What `/inference/v1/generate` answers, held against the request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreroute.engines.http import Answer
from foreroute.engines.sequences import Response, require_same_tokens
from foreroute.errors import EngineError


def response_of(
    answer: Answer,
    prompt: NDArray[np.int32],
    *,
    request_id: str,
    start: int = 0,
    masks: bool = False,
    echoes: bool = True,
) -> Response:
    """What the one choice of an answer of `/inference/v1/generate` says.

    Args:
        answer: as it came.
        prompt: int32 [P], what was asked.
        request_id: of the request.
        start: the `routed_experts_prompt_start` of the request.
        masks: whether sampling masks were asked for.
        echoes: whether this release states the prompt; vLLM does from 0.30 on, and its length before.

    Raises:
        EngineError: when it lacks what was asked for, or is the answer to another request.
    """
    if not (named := answer.read(str, "request_id")).endswith(request_id):
        raise EngineError(f"the vLLM server answers the request {named!r:.80}, asked was {request_id!r}")
    if echoes:
        require_same_tokens("the prompt", prompt, answer.integers("prompt_token_ids"))
    elif (length := answer.read(int, "usage", "prompt_tokens")) != len(prompt):
        raise EngineError(f"the vLLM server answers a prompt of {length} tokens, it was sent {len(prompt)}")
    if len(choices := answer.each("choices")) != 1:
        raise EngineError(f"the vLLM server returned {len(choices)} responses, asked for 1")
    (choice,) = choices
    if number := choice.read(int, "index"):
        raise EngineError(f"the vLLM server numbered its one response {number}; expected 0")
    reason, tokens = choice.read(str, "finish_reason"), choice.integers("token_ids")
    output = {"routed_experts": choice.value.get("routed_experts"), "token_ids": tokens}
    if reason == "abort" and output["routed_experts"] is None:
        output = {}  # before the first forward
    elif masks:
        output["sampling_mask"] = choice.read(list, "sampling_mask") if len(tokens) else []
    if output and len(tokens):
        output["weight_versions"] = choice.value.get("weight_versions")  # from 0.31 on
    steps = choice.each("logprobs", "content")
    logprobs = Answer([step.value.get("logprob") for step in steps], "the log-probs of the vLLM server").numbers()
    return Response(prompt, tokens, logprobs, _tokens_of(steps), reason, output or None, start)


def _tokens_of(steps: Sequence[Answer]) -> NDArray[np.int32]:
    """The token of each log-prob: `token_id` from 0.31 on, and a text "token_id:7" before."""
    named = [
        step.value["token_id"] if step.has("token_id") else step.read(str, "token").removeprefix("token_id:")
        for step in steps
    ]
    whole = [int(each) if isinstance(each, str) and each.isascii() and each.isdecimal() else each for each in named]
    return Answer(whole, "the tokens of the vLLM server's log-probs").integers()
