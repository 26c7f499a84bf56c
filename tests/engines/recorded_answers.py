"""Recorded answers of engines, and a server that gives them again."""

import json
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import numpy as np

from foreroute import LayerKind, RoutedLayer, RoutingSpec

POLL_S = 0.01
"""How long a server may take to see that it is to end."""


def payload(path):
    """A record, with its spec and its expected routes as arrays."""
    record = json.loads(path.read_text(encoding="utf-8"))
    facts = record["model"]
    layers = tuple(RoutedLayer(index, LayerKind.DECODER) for index in facts["layers"])
    record["spec"] = RoutingSpec(facts["num_experts"], facts["top_k"], layers)
    record["expected"] = [np.array(sets) for sets in record["hf_expert_sets"]]
    return record


def assert_routes(trace, record, *, start=0):
    """The trace holds the sets of the Hugging Face model from `start` on, and nothing else."""
    assert [trace.tokens(s).tolist() for s in range(len(trace))] == record["tokens"]
    for s, expected in enumerate(record["expected"]):
        one = trace.select([s])
        routed = np.flatnonzero(one.valid_N)
        assert routed.tolist() == list(range(start, len(expected) - 1))
        assert np.array_equal(np.sort(one.expert_ids_NLK[routed]), expected[routed])


def handler_of(answer):
    """Handles requests by `answer(method, path, body)`: (status, JSON value or bytes, and headers if any)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._reply(None)

        def do_POST(self):
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *args):
            pass

        def _reply(self, body):
            status, value, *headers = answer(self.command, self.path, body)
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            for name, said in (headers[0] if headers else {}).items():
                self.send_header(name, said)
            self.end_headers()
            with suppress(OSError):  # of who has gone
                self.wfile.write(data)

    return Handler


@contextmanager
def serving(answer):
    """A server whose answers are those of `handler_of`. Notes what was asked."""
    asked = []

    def noted(method, path, body):
        asked.append((path, body))
        return answer(method, path, body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(noted))
    Thread(target=server.serve_forever, args=(POLL_S,), daemon=True).start()
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", asked=asked)
    finally:
        server.shutdown()
        server.server_close()
