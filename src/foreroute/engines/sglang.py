"""SGLang behind an HTTP server of yours; SGLang itself is not imported. `docs/capture.md` has the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel
from foreroute.adapters.versions import require_engine
from foreroute.capture import Generation, Sampling
from foreroute.engines.base import OutsideEngine, Request, Response, WeightsFolder, stop_token_ids
from foreroute.engines.http import Answer, Client
from foreroute.errors import EngineError
from foreroute.replay.indexers import warn_of_choices

__all__ = ["SGLangServerEngine"]

ROUTES, CHOICES = "enable_return_routed_experts", "enable_return_indexer_topk"
MOST_KEPT = 4096
"""The most tokens of a sampling mask, unless the server was started with another --sampling-mask-max-tokens."""


class SGLangServerEngine(OutsideEngine):
    """The trainer's rollout engine behind an SGLang server that it has for itself.

    Weights go through a folder that both can read. Choices of sparse-attention indexers are asked for too, where the
    model has indexers and the server was started with --enable-return-indexer-topk; without that, a warning says so.

    Args:
        url: such as "http://127.0.0.1:30000".
        weights_folder: of one trainer at a time. The server must see it under the same path. Checkpoints are put into
            `foreroute-weights` in it.
        timeout_s: for each request.
        at_once: the most responses that are sampled at once.

    Attributes:
        weight_version: the version last loaded; every row is stamped with it.

    Raises:
        ConfigError: when `url` is no address, or another trainer has `weights_folder`.
        EngineError: when the server cannot be reached, is of a version that does not work, or was started without what
            replay needs.
    """

    def __init__(
        self,
        model: ServedModel,
        url: str,
        *,
        weights_folder: Path,
        timeout_s: float = 600.0,
        at_once: int = 256,
    ) -> None:
        super().__init__(model, "sglang")
        self._server = Client(url, timeout_s=timeout_s, what="the SGLang server", at_once=at_once)
        info = self._server.get("/server_info")
        self._engine_version = info.read(str, "version")
        require_engine("SGLang", self._engine_version)
        if not (info.has(ROUTES) and info.read(bool, ROUTES)):
            raise EngineError("the SGLang server must be started with --enable-return-routed-experts")
        returns_choices = info.has(CHOICES) and info.read(bool, CHOICES)
        self._choice_params = {"return_indexer_topk": True} if returns_choices and model.indexers else {}
        if model.indexers and not returns_choices:
            warn_of_choices("the server returns none of their choices", "Start it with --enable-return-indexer-topk")
        self._weights = WeightsFolder(weights_folder, model.writer)

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample as `Engine.generate` says, of `foreroute.engines.base`.

        A response also ends at the end-of-text token of the model's configuration. SGLang minds the seeds, which come
        from `generator`, only when it was started with --enable-deterministic-inference.
        """
        requests = self._make_requests(prompts, sampling, generator)
        truncation = (
            self._truncation_params(sampling, most=MOST_KEPT)
            if sampling.truncates
            else {"temperature": sampling.temperature}
        )
        params = {
            **truncation,
            "max_new_tokens": sampling.max_new_tokens,
            # with ignore_eos SGLang ignores these too
            "stop_token_ids": stop_token_ids(sampling),
            "ignore_eos": sampling.end_token < 0,
        }
        bodies = [
            {
                "rid": each.id,
                "input_ids": each.prompt.tolist(),
                "sampling_params": params | {"sampling_seed": each.seed},
                "return_logprob": True,
                "return_routed_experts": True,
                "return_sampling_mask": sampling.truncates,
                **self._choice_params,
            }
            for each in requests
        ]
        most = self._bound_answer(requests, most_kept=MOST_KEPT * sampling.truncates)
        answers = self._server.ask("/generate", bodies, most_bytes=most)
        responses = [read_response(*each) for each in zip(answers, requests, strict=True)]
        return self._to_generation(requests, responses, self._loaded[-1:])

    def _load_checkpoint(self, folder: str, version: int) -> None:
        request = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
        answer = self._server.post("/update_weights_from_disk", request)
        if not answer.read(bool, "success"):
            said = answer.value.get("message")
            raise EngineError(f"the SGLang server did not take the weights: {said!s:.600}")


def read_response(answer: Answer, request: Request) -> Response:
    """Read one answer of `/generate`; raise `EngineError` when it is of another request."""
    meta = Answer(answer.read(dict, "meta_info"), "the SGLang server's answer.meta_info")
    if (named := meta.read(str, "id")) != request.id:
        raise EngineError(f"the SGLang server answers the request {named!r:.80}, asked was {request.id!r}")
    if (length := meta.read(int, "prompt_tokens")) != len(request.prompt):
        raise EngineError(f"the SGLang server answers a prompt of {length} tokens, it was sent {len(request.prompt)}")
    tokens = answer.integers("output_ids")
    if not meta.has("weight_versions"):  # older releases have one version for all tokens
        meta.value["weight_versions"] = [{"version": meta.read(str, "weight_version"), "start": 0, "end": len(tokens)}]
    # an entry is a list of log-prob, token and text; None stands for what a short one lacks, and is refused below
    entries = [[*entry.read(list), None, None][:2] for entry in meta.elements("output_token_logprobs")]
    where = "the SGLang server's answer.meta_info.output_token_logprobs"
    logprobs, logprob_tokens = Answer([e[0] for e in entries], where), Answer([e[1] for e in entries], where)
    if request.sampling.truncates:
        # log-probs of the tokens that were left, not of the whole vocabulary
        meta.read(list, "output_token_sampling_mask")
        logprobs = Answer(meta.read(list, "output_token_sampling_logprobs"), where)
    reason = meta.read(str, "finish_reason", "type")
    return Response(tokens, logprobs.numbers(), logprob_tokens.integers(), reason, answer.value, states_versions=True)
