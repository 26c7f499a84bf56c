"""Every text or byte wire of the capture room with a valid sample and its decoder, and frames of engine workers.

No wire has a checksum: a byte of the payload that turns one plausible row into another cannot be noticed by any
reader. What can be noticed stands in `wires_as_text`: the parts of a sample in which the wire repeats itself, where
every change must be refused or change no route.
"""

import base64
import socket

import numpy as np

from foreroute import RoutingTrace
from foreroute.capture import decode
from foreroute.engines.vllm.ipc import Frame, receive_frame, send_frame
from foreroute.errors import EngineError
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
        *(
            Target(name, lambda rng, sample=sample: sample, _decode, forge=forge_json, check=_require_same_tokens)
            for name, sample, _ in wires_as_text()
        ),
        Target("frame", _frame, _read_frame, check=_require_frame),
    ]


def wires_as_text():
    """Name, valid sample, and the parts that the wire repeats."""
    npy = wires.npy(ROLLOUT.all_layers().astype(np.uint8))
    return [
        ("vllm-http", wires.vllm_http(ROLLOUT).encode(), [base64.b64encode(npy[:120])]),
        ("npy", npy, [b"'descr': '|u", b"'shape': (11, 5, 3)"]),
        ("sglang", wires.sglang(ROLLOUT).encode(), []),
        ("sglang-openai", wires.sglang_openai(ROLLOUT).encode(), []),
    ]


def _decode(raw):
    return decode(raw, model=ROLLOUT.spec, token_ids=ROLLOUT.tokens)


def _require_same_tokens(raw, trace):
    require_possible(raw, trace)
    assert trace.spec == SAMPLE_TRACE.spec
    assert np.array_equal(trace.token_ids_N, SAMPLE_TRACE.token_ids_N)
    assert np.array_equal(trace.valid_N, SAMPLE_TRACE.valid_N)


def _frame(rng):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rows = rng.integers(0, 9, (int(rng.integers(1, 9)), 3)).astype(np.uint8)
        send_frame(ours, Frame({"kind": "answer", "count": 3}, {"routes": rows, "logprobs": np.ones(4, np.float32)}))
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(1 << 16), b""))


def _read_frame(raw):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(raw)
        ours.shutdown(socket.SHUT_WR)
        try:
            return receive_frame(theirs, timeout_s=5.0)
        except EOFError as error:  # a channel that ends is not a frame, and its owner says which process died
            raise EngineError("the channel was closed") from error


def _require_frame(raw, frame):
    assert isinstance(frame.header, dict)
    assert sum(array.nbytes for array in frame.arrays.values()) <= len(raw)
