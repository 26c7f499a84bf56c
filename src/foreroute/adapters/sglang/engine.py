"""SGLang behind its HTTP server, started by someone else. `docs/engines.md` has the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.adapters.checkpoint import CheckpointWriter
from foreroute.adapters.endpoint import Endpoint
from foreroute.adapters.hf import RoutedModel
from foreroute.adapters.sampled import Sampled, draw_seeds, facts_of, generation_of, require_version
from foreroute.capture import Generation, Sampling
from foreroute.errors import EngineError
from foreroute.trace import NO_VERSION


class ServerEngine:
    """The trainer's rollout engine behind an SGLang server that it has for itself.

    Weights go through a folder that both can read.

    Args:
        routed: the policy.
        url: such as "http://127.0.0.1:30000".
        weights_folder: where checkpoints are put; the server must see it under the same path.
        timeout_s: for each request.

    Attributes:
        weight_version: the version last loaded; every row is stamped with it.

    Raises:
        EngineError: when the server cannot be reached, or was started without what replay needs.
    """

    def __init__(self, routed: RoutedModel, url: str, *, weights_folder: Path, timeout_s: float = 600.0) -> None:
        self.weight_version = NO_VERSION
        self._facts = facts_of(routed)
        self._writer = CheckpointWriter(routed.model)
        self._folder = weights_folder
        self._server = Endpoint(url, timeout_s=timeout_s, what="the SGLang server")
        info = self._server.get("/server_info")
        if not info.get("enable_return_routed_experts"):
            raise EngineError("the SGLang server must be started with --enable-return-routed-experts")
        self._engine_version = str(info.get("version", ""))

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take over the trainer's weights, forget the prefix cache, and stamp what follows with `version`."""
        folder = self._writer.write(self._folder / "weights", weights)
        request = {"model_path": str(folder.resolve()), "weight_version": str(version), "flush_cache": True}
        answer = self._server.post("/update_weights_from_disk", request)
        if not answer["success"]:
            raise EngineError(f"the SGLang server did not take the weights: {answer['message']}")
        self.weight_version = version

    def generate(
        self, prompts: Sequence[NDArray[np.int32]], sampling: Sampling, generator: torch.Generator
    ) -> Generation:
        """Sample `sampling.group_size` responses to each prompt; as `hf.EmbeddedEngine.generate`.

        A response also ends at the end-of-text token of the model's configuration. SGLang minds the seeds, which come
        from `generator`, only when it was started with --enable-deterministic-inference.
        """
        # one request for each response, so that each has a seed of its own
        asked = [prompt for prompt in prompts for _ in range(sampling.group_size)]
        params = {
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            # with ignore_eos SGLang ignores these too
            "stop_token_ids": [sampling.end_token],
        }
        body = {
            "input_ids": [prompt.tolist() for prompt in asked],
            "sampling_params": [params | {"sampling_seed": int(s)} for s in draw_seeds(generator, len(asked))],
            "return_logprob": True,
            "return_routed_experts": True,
        }
        answers = self._server.post("/generate", body)
        if not isinstance(answers, list) or len(answers) != len(asked):
            raise EngineError(f"the SGLang server did not return a list of {len(asked)} responses")
        sequences = []
        for prompt, answer in zip(asked, answers, strict=True):
            sequence, versions = sampled_of(answer, prompt)
            for stated in versions:
                require_version(stated, self.weight_version)
            sequences.append(sequence)
        return generation_of(
            sequences,
            self._facts,
            weight_version=self.weight_version,
            engine="sglang",
            engine_version=self._engine_version,
        )

    def close(self) -> None:
        """Nothing: the server is not the trainer's to end."""


def sampled_of(answer: Any, prompt: NDArray[np.int32], *, start: int = 0) -> tuple[Sampled, list[str]]:
    """The sequence of one answer of `/generate`, and the versions of the weights that sampled it.

    Args:
        answer: with `output_ids` and `meta_info`.
        prompt: int32 [P], what was asked.
        start: the `routed_experts_start_len` of the request.

    Raises:
        EngineError: when it lacks what was asked for.
    """
    try:
        meta = answer["meta_info"]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
        sequence = Sampled(
            prompt=prompt,
            response=np.array(answer["output_ids"], np.int32),
            logprobs=np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32),
            output={"meta_info": {"routed_experts": meta["routed_experts"]}},
            start=start,
            finished=meta["finish_reason"]["type"] != "abort",
        )
        return sequence, [str(span["version"]) for span in spans]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise EngineError(
            f"the SGLang server's answer lacks or garbles a field ({error!r}); expected 0.5.10 or newer"
        ) from error
