"""A server that answers as vLLM does: tokens follow from the seeds, and routes from token and weight version."""

import argparse
import json
import os
import signal
import socket
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np

import vllm
from tests.engines.recorded_answers import handler_of
from tests.wires import npy_text

ARGUMENTS = (
    *("--model", "--dtype", "--max-model-len", "--worker-extension-cls", "--logprobs-mode", "--generation-config"),
    *("--uds", "--gpu-memory-utilization", "--behaviour"),
)
SWITCHES = (
    *("--enable-return-routed-experts", "--skip-tokenizer-init", "--enforce-eager", "--no-enable-chunked-prefill"),
    *("--return-sampling-mask", "--disable-uvicorn-access-log", "--enable-scale-out"),
)


class Engine:
    """The state of the server."""

    def __init__(self, given):
        self.given = given
        self.config = json.loads((Path(given.model) / "config.json").read_text())
        self.version, self.behaviour = "default", given.behaviour

    def __call__(self, method, path, body):
        return 200, self.answer(path.partition("?")[0], body)

    def answer(self, path, body):
        if path == "/version":
            return {"version": vllm.__version__}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/server_info":
            given = self.given
            routes = {"enable_return_routed_experts": given.enable_return_routed_experts}
            model = {"logprobs_mode": given.logprobs_mode, "return_sampling_mask": given.return_sampling_mask}
            workers = {"worker_extension_cls": given.worker_extension_cls, "pipeline_parallel_size": 1}
            config = {"model_config": routes | model, "aux_output_config": routes, "parallel_config": workers}
            config |= {"cache_config": {"enable_prefix_caching": True}, "device_config": {"device": "cpu"}}
            config["scheduler_config"] = {"enable_chunked_prefill": not given.no_enable_chunked_prefill}
            return {"vllm_config": config}
        if path == "/collective_rpc":
            assert body["method"] == "foreroute_load"
            assert (Path(body["args"][0]) / "model.safetensors").exists()
            return {"results": body["args"]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/reset_prefix_cache":
            return {"success": True}
        return self.generate(body) if path == "/inference/v1/generate" else {}

    def generate(self, body):
        asked, prompt = body["sampling_params"], body["token_ids"]
        if self.behaviour == "dies":
            os.abort()
        if self.given.return_sampling_mask:
            assert asked["temperature"] > 0
            assert asked["top_k"] > 0
        assert all(0 <= token < self.config["vocab_size"] for token in asked["stop_token_ids"])
        answer = {"request_id": f"generate-tokens-{body['request_id']}", "choices": [self.choice(prompt, asked)]}
        if vllm.__version__ >= "0.30":
            answer["prompt_token_ids"] = prompt
        return answer | {"usage": {"prompt_tokens": len(prompt)}}

    def choice(self, prompt, asked):
        rng, tokens = np.random.default_rng(asked["seed"]), []
        while len(tokens) < asked["max_tokens"] and not set(tokens[-1:]) & set(asked["stop_token_ids"]):
            tokens.append(int(rng.integers(0, self.config["vocab_size"])))
        ended = set(tokens[-1:]) & set(asked["stop_token_ids"])
        names = [{"token_id": t} if vllm.__version__ >= "0.31" else {"token": f"token_id:{t}"} for t in tokens]
        found = {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": "stop" if ended else "length",
            "logprobs": {"content": [name | {"logprob": -1.5} for name in names]},
            "routed_experts": self.routes([*prompt, *tokens][:-1]),
            "sampling_mask": None,
        }
        if self.given.return_sampling_mask:
            found["sampling_mask"] = [self.kept(token, asked["top_k"]) for token in tokens]
        if vllm.__version__ >= "0.31":
            found["weight_versions"] = [{"version": self.version, "start": 0, "end": len(tokens)}]
        return found

    def kept(self, token, top_k):
        """A run of as many tokens as top_k says, of which the sampled one is the last where it can be."""
        first = max(0, token + 1 - top_k)
        return list(range(first, min(self.config["vocab_size"], first + top_k)))

    def routes(self, tokens):
        """A file of uint8 [rows, layers, K] that tells the tokens and the weight version."""
        config = self.config
        shape = (config["num_hidden_layers"], config["num_local_experts"])
        salt = len(self.version) + sum(map(ord, self.version))
        rows = [np.random.default_rng([salt, token]).random(shape).argsort(-1) for token in tokens]
        ids = np.stack(rows)[:, :, : config["num_experts_per_tok"]].astype(np.uint8)
        if self.behaviour == "zero routes":
            ids[:] = 0
        return npy_text(ids)


class Server(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True

    def server_bind(self):
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "vllm", 0


def main():
    parser = argparse.ArgumentParser()
    for name in ARGUMENTS:
        parser.add_argument(name)
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    given = parser.parse_args()
    if given.behaviour == "never ends":  # and has a child that no signal ends but the last
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg = lambda *_: None
        child = os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", "trap '' TERM; exec sleep 600")
        sys.stdout.write(f"child {child}\n")
    sys.stdout.write(f"it serves {given.model}\n")
    if given.behaviour == "refuses to load":
        # the cause stands far above the end, as with vLLM's several processes
        sys.stdout.write("ValueError: AuxOutput Connector requires Model Runner V2\n" + "another traceback\n" * 40)
        sys.exit(1)
    Server(given.uds, handler_of(Engine(given))).serve_forever()


if __name__ == "__main__":
    main()
