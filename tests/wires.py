"""Writers of every form that `foreroute.capture` reads, byte for byte as engines document them.

They share no code with the decoders, so that a round trip proves both. `Rollout` is one request with known routes.
"""

import base64
import json
import struct
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from foreroute import RoutedLayer, RoutingSpec


@dataclass(frozen=True)
class Rollout:
    """One request: P prompt tokens, G sampled tokens, and the routes of the T - 1 = P + G - 1 computed rows."""

    spec: RoutingSpec
    num_layers: int  # decoder layers in all, dense ones included
    prompt: list[int]
    response: list[int]
    routes_RLK: NDArray[np.int64]  # [T - 1, L, K], of routed layers

    @property
    def tokens(self):
        """Prompt and response, T tokens."""
        return self.prompt + self.response

    def all_layers(self, fill=0):
        """int64 [T - 1, layers, K], `fill` in dense layers."""
        rows, _, picks = self.routes_RLK.shape
        wide = np.full((rows, self.num_layers, picks), fill)
        wide[:, [layer.index for layer in self.spec.layers]] = self.routes_RLK
        return wide


def rollout(rng, *, experts=16, top_k=3, layers=4, dense=1, prompt=7, response=5):
    """A random request; tokens are distinct enough for every check to apply."""
    spec = RoutingSpec(experts, top_k, tuple(RoutedLayer(dense + i) for i in range(layers)), model="wire test")
    tokens = [int(t) for t in rng.integers(0, 50_000, prompt + response)]
    scores = rng.random((max(prompt + response - 1, 0), layers, experts))
    routes = np.argsort(scores, axis=-1)[..., :top_k]
    return Rollout(spec, dense + layers, tokens[:prompt], tokens[prompt:], routes)


def vllm_int32(r, start=0):
    """Of vLLM 0.14-0.20: request output with int32 [T-1-start, all layers, K]."""
    return request_output(r.prompt, r.response, r.all_layers()[start:].astype(np.int32))


def vllm_narrow(r, start=0):
    """Of vLLM 0.22+: the same with uint8 up to 256 experts, else uint16."""
    return request_output(r.prompt, r.response, _narrow(r, start))


def _narrow(r, start):
    return r.all_layers()[start:].astype(np.uint8 if r.spec.num_experts <= 256 else np.uint16)


def request_output(prompt, response, routes, *, logprobs=None, sets=None):
    """What vLLM answers in its own process; `sets` are the tokens that each was drawn from."""
    if logprobs is not None:
        logprobs = [
            {token: SimpleNamespace(logprob=each, rank=1)} for token, each in zip(response, logprobs, strict=True)
        ]
    masks = None if sets is None else SimpleNamespace(token_ids=sets)
    told = {"index": 0, "token_ids": response, "finish_reason": "length", "logprobs": logprobs, "sampling_mask": masks}
    choice = SimpleNamespace(**told, routed_experts=routes)
    return SimpleNamespace(request_id="1", prompt_token_ids=prompt, outputs=[choice], finished=True)


def completion_choice(prompt, response, routes, *, logprobs=None, index=0):
    """A choice of vLLM's server, as of `/v1/completions`."""
    choice = {"index": index, "text": "", "finish_reason": "length", "prompt_token_ids": prompt, "token_ids": response}
    if logprobs is not None:
        names = {"tokens": [f"token_id:{token}" for token in response], "top_logprobs": [{} for _ in response]}
        choice["logprobs"] = {"token_logprobs": logprobs, **names}
    return choice | {"routed_experts": None if routes is None else npy_text(routes)}


def npy(array):
    """A version 1.0 .npy file: magic, version, length of the padded header, header, C-order bytes."""
    rows, layers, picks = array.shape
    header = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': ({rows}, {layers}, {picks}), }}"
    padded = header + " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode() + array.tobytes()


def npy_text(array):
    """The same in base64, as vLLM's server sends arrays."""
    return base64.b64encode(npy(array)).decode()


def vllm_answer(r, start=0, **changed):
    """Of vLLM 0.22+ over HTTP, before it is text: base64 of a .npy file in its only choice, of which fields change."""
    return {"id": "cmpl-1", "choices": [completion_choice(r.prompt, r.response, _narrow(r, start)) | changed]}


def vllm_http(r, start=0):
    return json.dumps(vllm_answer(r, start))


def sglang_answer(r, start=0, **more):
    """SGLang /generate, before it is text: base64 of raw int32 bytes in meta_info, beside more."""
    meta = {"id": "1", "finish_reason": {"type": "length"}, "routed_experts": _raw_int32(r.all_layers()[start:])}
    return {"text": "", "output_ids": r.response, "meta_info": meta | more}


def sglang(r, start=0):
    return json.dumps(sglang_answer(r, start))


def sglang_openai(r, start=0):
    """SGLang /v1/completions and chat: the same text under sglext of the response."""
    body = {"id": "1", "choices": [{"index": 0, "text": ""}]}
    return json.dumps({**body, "sglext": {"routed_experts": _raw_int32(r.all_layers()[start:])}})


def verl(rollouts):
    """verl: prompts padded left, responses padded right, int16 [b, width, all layers, K] with zeros elsewhere."""
    left, right = max(len(r.prompt) for r in rollouts), max(len(r.response) for r in rollouts)
    tokens = np.zeros((len(rollouts), left + right), np.int64)
    mask = np.zeros_like(tokens)
    routes = np.zeros((*tokens.shape, *rollouts[0].all_layers().shape[1:]), np.int16)
    for b, r in enumerate(rollouts):
        first = left - len(r.prompt)
        tokens[b, first : first + len(r.tokens)] = r.tokens
        mask[b, first : first + len(r.tokens)] = 1
        routes[b, first : first + len(r.routes_RLK)] = r.all_layers()
    return {"routed_experts": routes, "input_ids": tokens, "attention_mask": mask}


def _raw_int32(rows):
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()
