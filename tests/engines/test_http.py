"""JSON over HTTP: answers are bounded in size and time, and come from the address that was named."""

import gzip
import socket
import time
from contextlib import contextmanager
from threading import Thread

import pytest

from foreroute.engines.http import Client
from foreroute.errors import ConfigError, EngineError
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


DRIPS = {
    "an answer": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{", b" "),
    "a header": (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"),
    "a handshake": (b"\x16\x03\x03\x40\x00", b"\x02"),
}


@grid("name", DRIPS, quick=1)
def test_what_drips_for_ever_ends_in_time(name):
    start = time.monotonic()
    with dripping(*DRIPS[name]) as url:
        url = url.replace("http", "https" if name == "a handshake" else "http")
        with pytest.raises(EngineError, match=r"answer within 0\.3"):
            Client(url, timeout_s=0.3, what="the server").get("/x")
    assert time.monotonic() - start < 5


def test_no_redirect_is_followed():
    with serving(lambda *_: (307, b"", {"Location": "file:///etc/passwd"})) as server:
        with pytest.raises(EngineError, match=r"refused.*307"):
            Client(server.url, timeout_s=5, what="the server").get("/x")
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    "url",
    [
        *("", "x", "file:///etc/passwd", "ftp://127.0.0.1/x", "127.0.0.1:8000", "//a", "http:a"),
        *("http://", "http:///x", "http://:80", "http://[::1", "http://a:b/", "http://a:0", "http://a:65536"),
        *("http://a b:1", "http://a ", "http://a\n", "http://\ud800", "http://user:word@a", "http://a?b=c", 3, None),
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_opened(url):
    with pytest.raises(ConfigError, match=r"address.*server"):
        Client(url, timeout_s=1, what="the server")


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
        (b"Content-Encoding: gzip", gzip.compress(b" " * 10_000_000 + b"{}"), "is not"),
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
