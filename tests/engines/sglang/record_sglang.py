"""Record answers of a running SGLang server, each with the routes of the Hugging Face model on the same tokens.

    python -m tests.engines.sglang.record_sglang http://127.0.0.1:30000

The server runs the model of `tests/engines/small_policy.py` (`ModelWriter(policy().model).write(folder)`) in float32.
"""

import json
import sys
from pathlib import Path

from foreroute.engines.http import Client
from tests.engines.small_policy import END, policy, prompts
from tests.engines.vllm.record_payloads import expected

PROMPT, OTHER = (p.tolist() for p in prompts(8, 40, seed=7))
PARAMS = {"temperature": 0.8, "max_new_tokens": 5, "stop_token_ids": [END]}
COMMON = {"sampling_params": PARAMS, "return_logprob": True, "return_routed_experts": True}
REQUESTS = {
    "generate": ("/generate", COMMON | {"input_ids": PROMPT}),
    "generate_start_len": ("/generate", COMMON | {"input_ids": PROMPT, "routed_experts_start_len": 6}),
    "generate_prefix_hit": ("/generate", COMMON | {"input_ids": OTHER}),
    "generate_n2": ("/generate", COMMON | {"input_ids": PROMPT, "sampling_params": PARAMS | {"n": 2}}),
    "completion_sglext": (
        "/v1/completions",
        {
            "model": "default",
            "prompt": PROMPT,
            "max_tokens": 5,
            "temperature": 0.8,
            "stop_token_ids": [END],
            "return_routed_experts": True,
            "return_token_ids": True,
        },
    ),
}


def main():
    routed = policy()
    server = Client(sys.argv[1], timeout_s=60, what="SGLang")
    version = server.get("/server_info").read(str, "version")
    for name, (path, body) in REQUESTS.items():
        answer = server.post(path, body).value
        answers = answer if isinstance(answer, list) else [answer]
        prompt = body.get("input_ids") or body["prompt"]
        responses = [{"token_ids": a["output_ids"]} for a in answers] if path == "/generate" else answer["choices"]
        record = {
            "engine": {"name": "sglang", "version": version},
            "path": path,
            "request": body,
            "response": answer,
            **expected(routed, {"prompt": prompt}, {"choices": responses}),
        }
        folder = Path(__file__).parent / "data"
        (folder / f"{name}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
