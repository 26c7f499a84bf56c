"""JSON over HTTP: answers are bounded in size and time, and come from the address that was named."""

import socket
import time
from contextlib import contextmanager
from threading import Thread

import pytest

from foreroute.engines import http
from foreroute.engines.http import Endpoint
from foreroute.errors import ConfigError, EngineError
from tests.engines.recorded_answers import serving


@contextmanager
def dripping(first, then=b" "):
    """A server that sends a few bytes, and then one every 50 ms for ever."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            try:
                connection.sendall(first)
                while True:
                    time.sleep(0.05)
                    connection.sendall(then)
            except OSError:
                return

    Thread(target=serve, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("status", [b"200 OK", b"500 Internal Server Error"])
def test_an_answer_that_drips_for_ever_ends_in_time(status):
    start = time.monotonic()
    head = b"HTTP/1.1 " + status + b"\r\nContent-Length: 100000\r\n\r\n{"
    with dripping(head) as url, pytest.raises(EngineError, match=r"did not answer within 0\.5 s"):
        Endpoint(url, timeout_s=0.5, what="the server").get("/x")
    assert time.monotonic() - start < 5


def test_a_server_that_says_nothing_ends_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"did not answer within 0\.2 s"):
            Endpoint(url, timeout_s=0.2, what="the server").post("/x", {})


def test_an_answer_without_a_body_is_one_in_which_nothing_stands():
    """As of requests that are answered by their status alone."""
    with serving(lambda *_: (200, b" ")) as server:
        answer = Endpoint(server.url, timeout_s=5, what="the server").post("/x", {})
    assert answer.value is None
    with pytest.raises(EngineError, match=r"x\.success lacks or garbles a field: None has no 'success'"):
        answer.read(bool, "success")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["/other", "http://127.0.0.1:1/", "file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_no_redirect_is_followed(status, target):
    with serving(lambda *_: (status, b"", {"Location": target})) as server:
        for ask in (lambda e: e.get("/x"), lambda e: e.post("/x", {})):
            with pytest.raises(EngineError, match=f"sends to {target}; name the address itself"):
                ask(Endpoint(server.url, timeout_s=5, what="the server"))
        assert len(server.asked) == 2


@pytest.mark.parametrize(
    "url",
    [
        *("", "x", "file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "127.0.0.1:8000"),
        *("http://", "http:///x", "http://:80", "http://[::1", "http://a:b/"),
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_opened(url):
    with pytest.raises(ConfigError, match="is no address of the server"):
        Endpoint(url, timeout_s=1, what="the server")


def test_an_answer_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(http, "MAX_RESPONSE_BYTES", 1000)
    with (
        serving(lambda *_: (200, b'"' + b"x" * 2000 + b'"')) as server,
        pytest.raises(EngineError, match="more than 1000 bytes"),
    ):
        Endpoint(server.url, timeout_s=5, what="the server").get("/x")


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, b"\xff\xfe", b"9" * 10_000, b"<html>" * 1000])
def test_what_is_no_json_is_one_short_error(text):
    with serving(lambda *_: (200, text)) as server, pytest.raises(EngineError, match="is not") as caught:
        Endpoint(server.url, timeout_s=5, what="the server").get("/x")
    assert len(str(caught.value)) < 500


def test_what_a_server_says_is_quoted_in_part_and_printable():
    with serving(lambda *_: (400, b"\x1b[2J" + b"x" * 5000)) as server, pytest.raises(EngineError) as caught:
        Endpoint(server.url, timeout_s=5, what="the server").get("/x")
    assert r"\x1b[2J" in str(caught.value)
    assert len(str(caught.value)) < 1000
