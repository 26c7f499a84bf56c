"""Every text or byte wire of the capture room with a valid sample and its decoder.

No wire has a checksum: a byte of the payload that turns one plausible row into another cannot be noticed by any
reader. What can be noticed stands in `wires_as_text`: the parts of a sample in which the wire repeats itself, where
every change must be refused or change no route.
"""

import base64
import json

import numpy as np

from foreroute import RoutingTrace
from foreroute.capture import decode
from tests import wires
from tests.robustness.mutations import forge_json
from tests.robustness.target import Target
from tests.robustness.traces import require_possible

ROLLOUT = wires.rollout(np.random.default_rng(7))
SAMPLE_TRACE = RoutingTrace.from_sequences(ROLLOUT.spec, [ROLLOUT.tokens], [ROLLOUT.routes_RLK])
"""The routes of every valid sample."""


def wire_targets(folder):
    """Their readers."""
    return [
        Target(name, lambda rng, sample=sample: sample, _decode, forge=forge_json, check=_require_same_tokens)
        for name, sample, _ in wires_as_text()
    ]


def wires_as_text():
    """Name, valid sample, and the parts that the wire repeats."""
    npy = wires.npy(ROLLOUT.all_layers().astype(np.uint8))
    return [
        ("vllm-http", wires.vllm_http(ROLLOUT).encode(), [base64.b64encode(npy[:120])]),
        ("npy", npy, [b"'descr': '|u", b"'shape': (11, 5, 3)"]),
        ("sglang", wires.sglang(ROLLOUT).encode(), []),
        ("sglang-openai", wires.sglang_openai(ROLLOUT).encode(), []),
        ("lists", json.dumps(ROLLOUT.routes_RLK.tolist()).encode(), []),
        ("table", json.dumps(_table()).encode(), [b'"shape": [11, 4, 3]', b'"dtype": "uint8"']),
    ]


def _table():
    data = base64.b64encode(ROLLOUT.routes_RLK.astype(np.uint8).tobytes()).decode()
    return {"data": data, "shape": [11, 4, 3], "dtype": "uint8"}


def _decode(raw):
    return decode(raw, model=ROLLOUT.spec, token_ids=ROLLOUT.tokens)


def _require_same_tokens(raw, trace):
    require_possible(raw, trace)
    assert trace.spec == SAMPLE_TRACE.spec
    assert np.array_equal(trace.token_ids_N, SAMPLE_TRACE.token_ids_N)
    assert np.array_equal(trace.valid_N, SAMPLE_TRACE.valid_N)
