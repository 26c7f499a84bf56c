"""SGLang behind its HTTP server, started by someone else. `docs/engines.md` has the command line.

SGLang itself is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import ServedModel, Weights
from foreroute.adapters.versions import require_engine
from foreroute.capture import Generation, Sampling
from foreroute.engines.base import (
    OutsideEngine,
    SampledSequence,
    draw_seeds,
    generation_of,
    require_version,
    stop_token_ids,
)
from foreroute.engines.http import Answer, Endpoint
from foreroute.engines.weights_folder import WeightsFolder
from foreroute.errors import EngineError

__all__ = ["SGLangServerEngine"]

ROUTES, CHOICES = "enable_return_routed_experts", "enable_return_indexer_topk"
"""Settings of a server."""
REASONS = ("stop", "length", "abort")
MOST_KEPT = 4096
"""Tokens of a sampling mask, unless the server was started with another --sampling-mask-max-tokens."""


class SGLangServerEngine(OutsideEngine):
    """The trainer's rollout engine behind an SGLang server that it has for itself.

    Weights go through a folder that both can read. Of a model with indexers of sparse attention their choices are asked
    for too, where the server was started with --enable-return-indexer-topk.

    Args:
        model: the policy, as it is served.
        url: such as "http://127.0.0.1:30000".
        weights_folder: where checkpoints are put: new, empty, or used for nothing else before. The server must see it
            under the same path.
        timeout_s: for each request.

    Attributes:
        weight_version: the version last loaded; every row is stamped with it.

    Raises:
        ConfigError: when `url` is no address, or `weights_folder` holds something else.
        EngineError: when the server cannot be reached, is of a version that does not work, or was started without what
            replay needs.
    """

    def __init__(self, model: ServedModel, url: str, *, weights_folder: Path, timeout_s: float = 600.0) -> None:
        super().__init__(model)
        self._server = Endpoint(url, timeout_s=timeout_s, what="the SGLang server")
        info = self._server.get("/server_info")
        self._engine_version = info.read(str, "version")
        require_engine("SGLang", self._engine_version)
        if not (info.has(ROUTES) and info.read(bool, ROUTES)):
            raise EngineError("the SGLang server must be started with --enable-return-routed-experts")
        returns_choices = info.has(CHOICES) and info.read(bool, CHOICES)
        self._asked_too = {"return_indexer_topk": True} if returns_choices and model.indexers else {}
        self._weights = WeightsFolder(weights_folder, model.writer)

    def load_weights(self, weights: Weights, version: int) -> None:
        """Take over the trainer's weights, forget the prefix cache, and stamp what follows with `version`."""
        folder = self._weights.put(weights)
        request = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        with self._loading(version):
            answer = self._server.post("/update_weights_from_disk", request)
            if not answer.read(bool, "success"):
                said = answer.value.get("message")
                raise EngineError(f"the SGLang server did not take the weights: {said!s:.600}")

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt; as `embedded.EmbeddedEngine.generate`.

        A response also ends at the end-of-text token of the model's configuration. SGLang minds the seeds, which come
        from `generator`, only when it was started with --enable-deterministic-inference.
        """
        self._require_ready(sampling)
        # one request for each response, so that each has a seed of its own
        asked = [prompt for prompt in prompts for _ in range(sampling.group_size)]
        cuts = self._cuts(sampling, most=MOST_KEPT) if sampling.truncates else {"temperature": sampling.temperature}
        params = {
            **cuts,
            "max_new_tokens": sampling.max_new_tokens,
            # with ignore_eos SGLang ignores these too
            "stop_token_ids": stop_token_ids(sampling),
        }
        body = {
            "input_ids": [prompt.tolist() for prompt in asked],
            "sampling_params": [params | {"sampling_seed": int(s)} for s in draw_seeds(generator, len(asked))],
            "return_logprob": True,
            "return_routed_experts": True,
            "return_sampling_mask": sampling.truncates,
            **self._asked_too,
        }
        answers = self._server.post("/generate", body).value
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise EngineError(f"the SGLang server did not return a list of {len(asked)} responses")
        sequences = []
        for prompt, answer in zip(asked, answers, strict=True):
            sequence, versions = sequence_of(answer, prompt, masks=sampling.truncates)
            for stated in versions:
                require_version(stated, self.weight_version)
            sequences.append(sequence)
        return generation_of(
            sequences,
            self._served,
            weight_version=self.weight_version,
            engine="sglang",
            engine_version=self._engine_version,
        )

    def close(self) -> None:
        """Let go of the folder of weights; the server is not the trainer's to end. May be called again."""
        self._weights.close()


def sequence_of(
    answer: Any, prompt: NDArray[np.int32], *, start: int = 0, masks: bool = False
) -> tuple[SampledSequence, list[str]]:
    """The sequence of one answer of `/generate`, and the versions of the weights that sampled it.

    Args:
        answer: with `output_ids` and `meta_info`.
        prompt: int32 [P], what was asked.
        start: the `routed_experts_start_len` of the request.
        masks: whether sampling masks were asked for. Log-probs are then those on the masks.

    Raises:
        EngineError: when it lacks what was asked for, or is the answer to a prompt of another length.
    """
    found = Answer(answer, "the SGLang server's answer")
    meta = Answer(found.read(dict, "meta_info"), "the SGLang server's answer.meta_info")
    if meta.has("prompt_tokens") and (length := meta.read(int, "prompt_tokens")) != len(prompt):
        raise EngineError(f"the SGLang server answers a prompt of {length} tokens, it was sent {len(prompt)}")
    if meta.has("weight_versions"):
        versions = [span.read(str, "version") for span in meta.each("weight_versions")]
    else:
        versions = [meta.read(str, "weight_version")]
    if (reason := meta.read(str, "finish_reason", "type")) not in REASONS:
        raise EngineError(f"the SGLang server ended a response for the reason {reason!r:.40}; expected {REASONS}")
    held = {name: meta.value.get(name) for name in ("routed_experts", "indexer_topk")}
    if masks:
        held["output_token_sampling_mask"] = meta.read(list, "output_token_sampling_mask")
        logprobs = meta.numbers("output_token_sampling_logprobs")
    else:
        # each is a list of log-prob, token and text
        entries = [(entry.read(list) or [None])[0] for entry in meta.each("output_token_logprobs")]
        logprobs = Answer(entries, "the SGLang server's answer.meta_info.output_token_logprobs").numbers()
    sequence = SampledSequence(
        prompt=prompt,
        response=found.integers("output_ids"),
        logprobs=logprobs,
        output={"output_ids": found.value["output_ids"], "meta_info": held},
        start=start,
        finished=reason != "abort",
    )
    return sequence, versions
