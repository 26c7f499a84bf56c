"""Record answers of a real vLLM server, each with the routes of the Hugging Face model on the same tokens.

    FOREROUTE_VLLM_PYTHON=.venv-vllm/bin/python python -m tests.engines.vllm.record_payloads

What it writes to `data/` needs no engine to be decoded.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np

from foreroute import RoutingTrace
from foreroute.adapters.checkpoint import ServedModel
from foreroute.engines.vllm import ServerSettings, VLLMEngine
from tests.engines.small_policy import END, forward, policy, prompts
from tests.engines.vllm.conftest import with_stand_ins

PROMPT, OTHER = (p.tolist() for p in prompts(8, 40, seed=7))
OPTIONS = {"block_size": 32, "max_num_seqs": 8}
COMMON = {
    "temperature": 0.8,
    "max_tokens": 5,
    "stop_token_ids": [END],
    "seed": 11,
    "logprobs": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
REQUESTS = {
    "completion": ("/v1/completions", COMMON | {"prompt": PROMPT}),
    "completion_n2": ("/v1/completions", COMMON | {"prompt": PROMPT, "n": 2}),
    "completion_prompt_start": ("/v1/completions", COMMON | {"prompt": PROMPT, "routed_experts_prompt_start": 6}),
    "completion_prefix_hit": ("/v1/completions", COMMON | {"prompt": OTHER}),
    "completion_one_token": ("/v1/completions", COMMON | {"prompt": PROMPT, "max_tokens": 1}),
    "generate": (
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, "temperature": 0.8, "seed": 11, "logprobs": 0}},
    ),
}


TRUNCATED = {"temperature": 0.8, "top_p": 0.9, "top_k": 64, "max_tokens": 5, "seed": 11, "logprobs": 0}
WITH_MASKS = {"generate_masks": ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": TRUNCATED})}
"""Asked of a server with the stand-ins of `releases.stand_ins`."""


def main():
    routed = policy()
    python = Path(os.environ["FOREROUTE_VLLM_PYTHON"]).absolute()
    record(routed, ServerSettings(python=python, precision="float32", options=OPTIONS), REQUESTS, cached=OTHER)
    with tempfile.TemporaryDirectory() as name:
        with_masks = with_stand_ins(python, Path(name))
        settings = ServerSettings(python=with_masks, precision="float32", options=OPTIONS, sampling_masks=True)
        record(routed, settings, WITH_MASKS)


def record(routed, settings, requests, *, cached=None):
    """What a server answers to each request, one file for each in `data`."""
    data = Path(__file__).parent / "data"
    with VLLMEngine(ServedModel.of(routed), settings) as engine:
        engine.load_weights(routed.model.state_dict(), version=0)
        server = engine._client
        if cached is not None:
            server.post("/v1/completions", COMMON | {"prompt": cached})
        for name, (path, body) in requests.items():
            answer = server.post(path, body).value
            found = {
                "engine": {"name": "vllm", "version": server.get("/version").read(str, "version")},
                "path": path,
                "request": body,
                "response": answer,
                **expected(routed, body, answer),
            }
            (data / f"{name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


def expected(routed, body, answer):
    """Tokens and sorted routes [T, L, K] of each choice, from the Hugging Face model in float32."""
    prompt = body.get("prompt") or body["token_ids"]
    tokens = [[*prompt, *choice["token_ids"]] for choice in answer["choices"]]
    trace = RoutingTrace.unrouted(routed.spec, [np.array(t) for t in tokens])
    own = forward(routed, trace)[0]
    spec = routed.spec
    sets = [np.sort(own.select([s]).expert_ids_NLK).tolist() for s in range(len(own))]
    facts = {"num_experts": spec.num_experts, "top_k": spec.top_k, "layers": [layer.index for layer in spec.layers]}
    return {"model": facts, "tokens": tokens, "hf_expert_sets": sets}


if __name__ == "__main__":
    main()
