"""JSON over HTTP: answers are bounded in size and time, and come from the address that was named."""

import gzip
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from threading import Thread

import pytest

from foreroute.engines.http import Client
from foreroute.errors import ConfigError, EngineError
from foreroute.testing.ranks import environment
from tests.engines.recorded_answers import serving
from tests.tiers import grid


@contextmanager
def dripping(first, then=b" ", times=160):
    """A server that sends a few bytes, and then some every 50 ms: for eight seconds, or so often."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            try:
                connection.sendall(first)
                for _ in range(times):
                    time.sleep(0.05)
                    connection.sendall(then)
            except OSError:
                return

    Thread(target=serve, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def ending_in_time(within_s=5.0):
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"answer within 0\.3"):
        yield
    assert time.monotonic() - start < within_s


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;"
DRIPS = {
    "an answer": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{", b" "),
    "nothing": (b"", b""),
    "a header": (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "trailers": (CHUNKED[:-1] + b"\r\n{}\r\n0\r\n", b"X: a\r\n"),
    "a handshake": (b"\x16\x03\x03\x40\x00", b"\x02"),
}


@grid("name", DRIPS, quick=1)
def test_what_drips_for_ever_ends_in_time(name):
    with dripping(*DRIPS[name]) as url, ending_in_time():
        address = url.replace("http", "https") if name == "a handshake" else url
        Client(address, timeout_s=0.3, what="the server").get("/x")


@pytest.mark.parametrize(("status", "target"), [(302, "/other"), (307, "file:///etc/passwd")])
def test_no_redirect_is_followed(status, target):
    with serving(lambda *_: (status, b"", {"Location": target})) as server:
        for ask in (lambda e: e.get("/x"), lambda e: e.post("/x", {})):
            with pytest.raises(EngineError, match=f"sends to {target}; name the address itself"):
                ask(Client(server.url, timeout_s=5, what="the server"))
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    "url",
    [
        *("", "x", "file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "127.0.0.1:8000"),
        *("http://", "http:///x", "http://:80", "http://[::1", "http://a:b/", "http://a:99999"),
        *("http://a b:1", "http://a ", "http://a%20b", "http://a\u2003b"),
        *("http://a:0", "http://a:-1", "http://a:65536", "http://a..b", "http://.a", "http://.", "http://a,b"),
        *("http://*", f"http://{'a' * 64}", f"http://{'a.' * 127}aa", "//a", "http:a"),
        *("http://\ud800", "http://a/\ud800", "http://a\n", "http://user:word@a", "http://a?b=c", "http://a#b"),
        *(3, None, b"http://a"),
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_opened(url):
    with pytest.raises(ConfigError, match=r"address.*server"):
        Client(url, timeout_s=1, what="the server")


FORKED = """
import os, signal, sys
from foreroute.engines.http import Client

client = Client(sys.argv[1], timeout_s=5, what="the server")
client.get("/x")
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(20)
os._exit(0 if client.get("/x").value == [1] else 1)
"""
"""Not of this process: what other tests' threads hold when it is forked, the child waits for without end."""


@pytest.mark.slow
def test_a_child_of_a_process_that_asked_may_ask():
    with serving(lambda *_: (200, [1])) as server:
        subprocess.run([sys.executable, "-c", FORKED, server.url], env=environment(), check=True, timeout=60)
        assert len(server.asked) == 2


def test_an_answer_longer_than_what_was_asked_for_is_refused():
    with serving(lambda *_: (200, b'"' + b"x" * 2000 + b'"')) as server:
        client = Client(server.url, timeout_s=5, what="the server")
        assert len(client.ask("/x", [{}], most_bytes=2002)[0].value) == 2000
    endless = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 3000
    with dripping(endless) as url, pytest.raises(EngineError, match="more than 2001 bytes"):
        Client(url, timeout_s=2, what="the server").ask("/x", [{}], most_bytes=2001)


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        (b"Content-Length: 9", b"{}", "broke off"),
        (b"Transfer-Encoding: chunked", b"2\r\n{}\r\n", "broke off"),
        (b"Content-Encoding: gzip", gzip.compress(b" " * 10_000_000 + b"{}"), "in the encoding 'gzip'"),
        (b"X-Long: " + b"x" * 1_000_000, b"{}", "broke off"),
    ],
    ids=["shorter than announced", "no last chunk", "compressed", "head"],
)
def test_an_answer_that_is_not_what_it_announces_is_refused(head, body, said):
    answer = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body
    with dripping(answer, times=0) as url, pytest.raises(EngineError, match=said):
        Client(url, timeout_s=5, what="the server").get("/x")


def test_answers_come_in_the_order_of_their_requests_and_one_that_fails_calls_the_others_off():
    def answer(method, path, body):
        time.sleep(0.05 * (body["n"] == 0))
        return (500, b"no") if body["n"] == 9 else (200, body)

    with serving(answer) as server:
        client = Client(server.url, timeout_s=5, what="the server", at_once=4)
        found = client.ask("/x", [{"n": n} for n in range(8)], most_bytes=100)
        assert [each.read(int, "n") for each in found] == [*range(8)]
        server.asked.clear()
        with pytest.raises(EngineError, match=r"refused.*status 500"):
            client.ask("/x", [{"n": 9}, *({"n": 0} for _ in range(40))], most_bytes=100)
        assert len(server.asked) < 20


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"\xff\xfe", b"9" * 10_000])
def test_what_is_no_json_is_one_short_error(text):
    with serving(lambda *_: (200, text)) as server, pytest.raises(EngineError, match="is not") as caught:
        Client(server.url, timeout_s=5, what="the server").get("/x")
    assert len(str(caught.value)) < 500
