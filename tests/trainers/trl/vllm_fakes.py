"""Stand-ins for vLLM in TRL's two modes, with the fields of vLLM 0.30's answers, sampled by the embedded engine.

Tokens and log-probs are those of a bfloat16 copy of the policy under the weights that TRL pushed. Names and shapes
are as recorded from real servers and processes (tests/engines/vllm/data).
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from examples.trl.tiny import policy
from foreroute.capture import Sampling
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.trace import SAMPLING
from tests.wires import completion_choice, request_output

END = 1
COLOCATE = {"use_vllm": True, "vllm_mode": "colocate"}
SERVER = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "http://localhost:1"}
"""What each mode is asked for with."""


class Sampler:
    """What both modes share: weights in, sequences out."""

    def __init__(self):
        self._engine = EmbeddedEngine(policy(seed=9), "bfloat16")
        self._generator = torch.Generator().manual_seed(5)
        self._weights, self._loads = {}, 0

    def load_weights(self, named):
        for name, tensor in named:
            self._weights[name] = tensor.detach().clone()

    def sample(self, prompts, *, count, max_tokens, temperature, **cuts):
        """(prompt, response, log-probs, routes, sets or None) of `count` responses to each prompt."""
        self._engine.load_weights(self._weights, self._loads)
        self._loads += 1
        sampling = Sampling(max_tokens, END, count, temperature, **cuts)
        prompts = [np.array(prompt, np.int32) for prompt in prompts]
        generation = self._engine.generate(prompts, sampling, self._generator)
        logprobs = np.split(generation.logprobs_R, np.cumsum(generation.response_lengths)[:-1])
        found, traces = [], [generation.trace.select([s]) for s in range(len(generation))]
        for s, trace in enumerate(traces):
            sets = sets_of(trace.streams[SAMPLING]) if SAMPLING in trace.streams else None
            routes = trace.expert_ids_NLK[trace.valid_N]
            response = generation.response(s).tolist()
            found.append((prompts[s // count].tolist(), response, logprobs[s].tolist(), routes, sets))
        return found


def sets_of(masks):
    """One list for each sampled token; the engine has none for sets that left nothing out."""
    lists = [ids.tolist() for ids in np.split(masks.ids, masks.offsets[1:-1])]
    return [lists[row] or list(range(masks.num_choices)) for row in np.flatnonzero(masks.valid_N)]


def colocated(monkeypatch):
    class LLM:
        def __init__(self, *, enable_return_routed_experts=False, return_sampling_mask=False, **settings):
            assert settings["logprobs_mode"] == "processed_logprobs"
            self._returns_masks = return_sampling_mask
            self._returns_routes = enable_return_routed_experts
            self._sampler = Sampler()
            runner = SimpleNamespace(model=self._sampler)
            executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
            lengths = SimpleNamespace(max_model_len=256)
            self.llm_engine = SimpleNamespace(model_executor=executor, model_config=lengths)

        def reset_prefix_cache(self):
            pass

        def generate(self, prompts, *, sampling_params, use_tqdm):
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            if self._returns_masks and not (sampling_params.temperature > 0 and sampling_params.top_k > 0):
                raise ValueError("sampling distribution replay requires temperature > 0 and top_k > 0")
            names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
            wanted = {name: getattr(sampling_params, name) for name in names}
            answers = []
            for prompt, response, logprobs, routes, sets in self._sampler.sample(ids, count=1, **wanted):
                routes, sets = routes if self._returns_routes else None, sets if self._returns_masks else None
                answers.append(request_output(prompt, response, routes, logprobs=logprobs, sets=sets))
            return answers

    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", LLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        # TRL sets them for vLLM, and the next trainer would take them for torchrun's: undoing this takes them away
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def served(monkeypatch, *, returns_routes=True):
    """Have TRL's own client find a server: everything but the request itself is TRL's code."""

    class Client(VLLMClient):
        def __init__(self, base_url=None, group_port=0, connection_timeout=0.0):
            if not hasattr(VLLMClient, "_post"):  # before TRL 1.11
                pytest.skip("this TRL asks a server of its own")
            self.base_url, self.model = base_url, "tiny"
            self._sampler = Sampler()

        init_communicator = reset_prefix_cache = lambda self, **_: None

        def get_server_info(self):
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def update_named_params(self, metadata, named):
            self._sampler.load_weights(named)

        def _post(self, url, **given):
            assert url.endswith("/v1/completions")
            body = given["json"]
            assert body["return_token_ids"]
            sampled = self._sampler.sample(
                body["prompt"], count=body["n"], max_tokens=body["max_tokens"], temperature=body["temperature"]
            )
            choices = [
                completion_choice(prompt, response, routes if returns_routes else None, logprobs=logprobs, index=index)
                for index, (prompt, response, logprobs, routes, _) in enumerate(sampled)
            ]
            return json.loads(json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": choices}))

    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "VLLMClient", Client)
