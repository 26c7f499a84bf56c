"""What the worker uses of vLLM 0.30, without a model: tokens and routes follow from the seeds alone."""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

__version__ = os.environ.get("FAKE_VLLM_VERSION", "0.30.0-fake")


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, behaviour, *, return_sampling_mask=False, **options):
        assert options["enable_return_routed_experts"]
        assert options["enforce_eager"]
        self.config = json.loads((Path(model) / "config.json").read_text())
        self.llm_engine = Engine(self.config, behaviour, return_sampling_mask)
        if behaviour == "refuses to load":
            raise RuntimeError("Unsupported CPU attention configuration")
        if behaviour == "prints and dies":
            sys.stderr.write("something terrible\n")
            os._exit(7)
        sys.stdout.write("what an engine prints is no frame\n")

    def collective_rpc(self, method, args):
        if method == "foreroute_seed":
            self.llm_engine.seed = args[0]
            return [None]
        assert method == "foreroute_load"
        assert (Path(args[0]) / "model.safetensors").exists()
        return ["/elsewhere"] if self.llm_engine.behaviour == "loads others" else [args[0]]

    def reset_prefix_cache(self):
        return self.llm_engine.behaviour != "busy cache"

    def get_metrics(self):
        return [SimpleNamespace(name="vllm:num_preemptions", value=2), SimpleNamespace(name="other")]


class Engine:
    ends = {"aborts": "abort", "repeats": "repetition"}  # noqa: RUF012

    def __init__(self, config, behaviour, masks):
        self.config, self.behaviour, self.masks = config, behaviour, masks
        self.version, self.seed = "default", 0
        self.output_processor = SimpleNamespace(request_states={})

    def set_weight_version(self, version):
        self.version = version

    def get_weight_version(self):
        return "17" if self.behaviour == "another trainer" else self.version

    def add_request(self, name, prompt, params):
        tokens = np.array(prompt["prompt_token_ids"])
        if self.masks and not (params.temperature > 0 and params.top_k > 0):
            raise ValueError("sampling distribution replay requires temperature > 0 and top_k > 0")
        if name in self.output_processor.request_states:
            raise ValueError(f"Request id {name} already running.")
        if not all(0 <= token < self.config["vocab_size"] for token in params.stop_token_ids):
            raise ValueError(f"token_id(s) {params.stop_token_ids} in stop_token_ids")
        if self.behaviour == "refuses 63" and tokens[0] == 63:
            raise ValueError("refused")
        state = SimpleNamespace(
            external_req_id=name,
            queue=None,
            params=params,
            prompt=tokens,
            rngs=[np.random.default_rng([self.seed, int(name.rpartition("/")[2]), i]) for i in range(params.n)],
            tokens=[[] for _ in range(params.n)],
        )
        self.output_processor.request_states[name] = state

    def has_unfinished_requests(self):
        return bool(self.output_processor.request_states)

    def step(self):
        if self.behaviour == "hangs":
            time.sleep(600)
        if self.behaviour == "slow":
            time.sleep(0.2)
        if self.behaviour == "dies":
            os.abort()
        outputs = []
        for name, state in list(self.output_processor.request_states.items()):
            for tokens, rng in zip(state.tokens, state.rngs, strict=True):
                if not self._ended(tokens, state.params):
                    tokens.append(int(rng.integers(0, self.config["vocab_size"])))
            if all(self._ended(tokens, state.params) for tokens in state.tokens):
                outputs.append(self._output(name, "stop"))
        return outputs

    def abort_request(self, names):
        for name in names:
            if (state := self.output_processor.request_states.get(name)) is not None:
                output = self._output(name, "abort")
                if state.queue is not None:
                    state.queue.put(output)

    def _ended(self, tokens, params):
        return bool(set(tokens[-1:]) & set(params.stop_token_ids)) or len(tokens) == params.max_tokens

    def _output(self, name, reason):
        state = self.output_processor.request_states.pop(name)
        choices = []
        for index, tokens in zip(itertools.count(), state.tokens, strict=False):
            done = self.ends.get(self.behaviour, "stop") if self._ended(tokens, state.params) else reason
            sequence = [*state.prompt.tolist(), *tokens]
            steps = [{token: SimpleNamespace(logprob=-1.5)} for token in tokens]
            rows = self._routes(sequence)[state.params.routed_experts_prompt_start : len(sequence) - 1]
            choice = SimpleNamespace(index=index, token_ids=tokens, logprobs=steps, finish_reason=done)
            choice.routed_experts = rows
            choice.sampling_mask = None
            if self.masks and tokens:
                choice.sampling_mask = SimpleNamespace(token_ids=[self.kept(t, state.params) for t in tokens])
            choices.append(choice)
        return SimpleNamespace(request_id=name, finished=True, outputs=choices[::-1])

    def kept(self, token, params):
        """A run of as many tokens as top_k says, of which the sampled one is the last where it can be."""
        first = max(0, token + 1 - params.top_k)
        return list(range(first, min(self.config["vocab_size"], first + params.top_k)))

    def _routes(self, sequence):
        """[T, L, K] that tell the token and the weight version."""
        config = self.config
        shape = (config["num_hidden_layers"], config["num_local_experts"])
        if self.behaviour == "zero routes":
            return np.zeros((len(sequence), shape[0], config["num_experts_per_tok"]), np.uint8)
        salt = len(self.version) + sum(map(ord, self.version))
        rows = [np.random.default_rng([salt, token]).random(shape).argsort(-1) for token in sequence]
        return np.stack(rows)[..., : config["num_experts_per_tok"]].astype(np.uint8)
