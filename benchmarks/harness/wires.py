"""Writers of every wire that `foreroute.capture` reads, byte for byte as engines document them.

They share no code with the decoders, so that a round trip proves both. `Rollout` is one request with known routes.
"""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute import RoutedLayer, RoutingSpec
from foreroute.capture import ModelFacts


@dataclass(frozen=True)
class Rollout:
    """One request: P prompt tokens, G sampled tokens, and the routes of the T - 1 = P + G - 1 computed rows.

    Attributes:
        facts: the model, with `dense` leading dense layers.
        prompt, response: token ids.
        routes_RLK: int64 [T - 1, L, K], the routed layers.
    """

    facts: ModelFacts
    prompt: list[int]
    response: list[int]
    routes_RLK: NDArray[np.int64]

    @property
    def tokens(self) -> list[int]:
        """Prompt and response, T tokens."""
        return self.prompt + self.response

    def all_layers(self, fill: int = 0) -> NDArray[np.int64]:
        """int64 [T - 1, layers, K], `fill` in dense layers."""
        rows, _, picks = self.routes_RLK.shape
        wide = np.full((rows, self.facts.num_hidden_layers or 0, picks), fill)
        wide[:, [layer.index for layer in self.facts.spec.layers]] = self.routes_RLK
        return wide


def rollout(
    rng: np.random.Generator,
    *,
    experts: int = 16,
    top_k: int = 3,
    layers: int = 4,
    dense: int = 1,
    prompt: int = 7,
    response: int = 5,
) -> Rollout:
    """A random request; tokens are distinct enough for every check to apply."""
    spec = RoutingSpec(experts, top_k, tuple(RoutedLayer(dense + i) for i in range(layers)), model="wire test")
    tokens = [int(t) for t in rng.integers(0, 50_000, prompt + response)]
    scores = rng.random((max(prompt + response - 1, 0), layers, experts))
    routes = np.argsort(scores, axis=-1)[..., :top_k]
    return Rollout(ModelFacts(spec, dense + layers), tokens[:prompt], tokens[prompt:], routes)


def vllm_int32(r: Rollout, start: int = 0) -> Any:
    """Of vLLM 0.14-0.20: request output with int32 [T-1-start, all layers, K]."""
    return _request_output(r, r.all_layers()[start:].astype(np.int32))


def vllm_narrow(r: Rollout, start: int = 0) -> Any:
    """Of vLLM 0.22+: the same with uint8 up to 256 experts, else uint16."""
    dtype = np.uint8 if r.facts.spec.num_experts <= 256 else np.uint16
    return _request_output(r, r.all_layers()[start:].astype(dtype))


def vllm_split(r: Rollout) -> Any:
    """Of vLLM 0.21 in process: int16 prompt rows on the request, generated rows on the choice, MoE layers only."""
    p = len(r.prompt)
    output = _request_output(r, r.routes_RLK[p:].astype(np.int16))
    output.prompt_routed_experts = r.routes_RLK[:p].astype(np.int16)
    return output


def vllm_split_json(r: Rollout) -> str:
    """Of vLLM 0.21 over HTTP: nested lists, prompt rows at response level."""
    p = len(r.prompt)
    choice = {"index": 0, "text": "", "routed_experts": r.routes_RLK[p:].tolist(), "token_ids": r.response}
    body = {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "prompt_token_ids": r.prompt}
    return json.dumps({**body, "prompt_routed_experts": r.routes_RLK[:p].tolist()})


def npy(array: NDArray[Any]) -> bytes:
    """A version 1.0 .npy file: magic, version, length of the padded header, header, C-order bytes."""
    rows, layers, picks = array.shape
    header = f"{{'descr': '{array.dtype.str}', 'fortran_order': False, 'shape': ({rows}, {layers}, {picks}), }}"
    padded = header + " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode() + array.tobytes()


def vllm_http(r: Rollout, start: int = 0) -> str:
    """Of vLLM 0.22+ over HTTP: base64 of a .npy file for each choice."""
    dtype = np.uint8 if r.facts.spec.num_experts <= 256 else np.uint16
    text = base64.b64encode(npy(r.all_layers()[start:].astype(dtype))).decode()
    choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": r.response, "routed_experts": text}
    return json.dumps({"id": "cmpl-1", "choices": [{**choice, "prompt_token_ids": r.prompt}]})


def sglang(r: Rollout, start: int = 0) -> str:
    """SGLang /generate: base64 of raw int32 bytes in meta_info."""
    meta = {"id": "1", "finish_reason": {"type": "length"}, "routed_experts": _raw_int32(r.all_layers()[start:])}
    return json.dumps({"text": "", "output_ids": r.response, "meta_info": meta})


def sglang_openai(r: Rollout, start: int = 0) -> str:
    """SGLang /v1/completions and chat: the same text under sglext of the response."""
    body = {"id": "1", "choices": [{"index": 0, "text": ""}]}
    return json.dumps({**body, "sglext": {"routed_experts": _raw_int32(r.all_layers()[start:])}})


def sglang_jax(r: Rollout) -> str:
    """sglang-jax /v1/completions: raw int32 on the choice, -1 in dense layers."""
    return json.dumps({"choices": [{"index": 0, "text": "", "routed_experts": _raw_int32(r.all_layers(-1))}]})


def tensorrt_llm(r: Rollout) -> Any:
    """TensorRT-LLM: request output with [T-1, MoE layers, K]."""
    return _request_output(r, r.routes_RLK.astype(np.int32))


def lmdeploy(r: Rollout, rng: np.random.Generator) -> Any:
    """LMDeploy: uint16 [T-1, all layers, K], whatever was in memory in dense layers."""
    wide = r.all_layers()
    routed = [layer.index for layer in r.facts.spec.layers]
    dense = np.setdiff1d(np.arange(wide.shape[1]), routed)
    wide[:, dense] = rng.integers(0, 1 << 16, wide[:, dense].shape)
    routes = wide.astype(np.uint16)
    return SimpleNamespace(input_token_len=len(r.prompt), token_ids=r.response, routed_experts=routes)


def nemo_rl(r: Rollout, absent: NDArray[np.bool_] | None = None) -> str:
    """NeMo RL: nrlre1:dtype:SxLxK:base64 of T rows in a signed dtype, -1 where nothing was routed."""
    dtype = "int8" if r.facts.spec.num_experts <= 128 else "int16"
    rows = np.concatenate([r.routes_RLK, np.full((1, *r.routes_RLK.shape[1:]), -1)])
    if absent is not None:
        rows[absent] = -1
    shape = "x".join(map(str, rows.shape))
    return f"nrlre1:{dtype}:{shape}:{base64.b64encode(rows.astype(dtype).tobytes()).decode()}"


def prime_rl(r: Rollout, start: int = 0) -> str:
    """prime-rl: JSON of data, shape, start and dtype."""
    rows = r.all_layers()[start:]
    dtype = "uint8" if r.facts.spec.num_experts <= 256 else "uint16"
    text = base64.b64encode(rows.astype(dtype).tobytes()).decode()
    return json.dumps({"data": text, "shape": list(rows.shape), "start": start, "dtype": dtype})


def skyrl(r: Rollout) -> bytes:
    """SkyRL: orjson bytes of data, shape and a dtype chosen from the largest id at hand."""
    high = int(r.routes_RLK.max(initial=0))
    dtype = "uint8" if high < 256 else "int16" if high < 1 << 15 else "int32"
    text = base64.b64encode(r.all_layers().astype(dtype).tobytes()).decode()
    body = {"data": text, "shape": list(r.all_layers().shape), "dtype": dtype}
    return json.dumps(body, separators=(",", ":")).encode()


def verl(rollouts: list[Rollout]) -> dict[str, NDArray[Any]]:
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


def _request_output(r: Rollout, routes: NDArray[Any]) -> Any:
    choice = SimpleNamespace(index=0, token_ids=r.response, routed_experts=routes, finish_reason="length")
    return SimpleNamespace(request_id="1", prompt_token_ids=r.prompt, outputs=[choice], finished=True)


def _raw_int32(rows: NDArray[Any]) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()
