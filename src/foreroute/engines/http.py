"""JSON over HTTP, for engines behind a server, whose answers are read with suspicion."""

from __future__ import annotations

import json
import socket
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import ConfigError, EngineError
from foreroute.files import parse_json

MAX_RESPONSE_BYTES = 1 << 32
MAX_ERROR_CHARS = 600
_CHUNK_BYTES = 1 << 20
_NAMES = {str: "text", int: "an integer", bool: "true or false", dict: "an object", list: "a list"}

T = TypeVar("T")


class Answer:
    """What a server said, of which nothing is taken for granted.

    Args:
        value: plain JSON data.
        where: names the answer, for messages.

    Attributes:
        value: as above.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self._where = where

    def read(self, kind: type[T], *path: str | int) -> T:
        """What stands at a path of names and positions.

        Raises:
            EngineError: when nothing stands there, or something of another kind.
        """
        value = self.value
        for key in path:
            is_there = (isinstance(value, dict) and key in value) or (
                isinstance(value, list) and isinstance(key, int) and 0 <= key < len(value)
            )
            if not is_there:
                raise self._garbled(path, f"{value!r:.80} has no {key!r}", _NAMES[kind])
            value = value[key]
        if type(value) is not kind:
            raise self._garbled(path, f"{value!r:.80}", _NAMES[kind])
        return value

    def has(self, name: str) -> bool:
        """Whether it is an object with this name, and not null there."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def each(self, *path: str | int) -> list[Answer]:
        """The elements of a list. Raises as `read`."""
        where = self._named(path)
        return [Answer(value, f"{where}[{number}]") for number, value in enumerate(self.read(list, *path))]

    def integers(self, *path: str | int) -> NDArray[np.int32]:
        """int32 [N], a list of integers. Raises as `read`."""
        values = self.read(list, *path)
        if not all(type(value) is int and abs(value) < 1 << 31 for value in values):
            raise self._garbled(path, f"{values!r:.80}", "a list of integers of 32 bits")
        return np.array(values, np.int32)

    def numbers(self, *path: str | int) -> NDArray[np.float32]:
        """float32 [N], a list of numbers; null is no number (NaN). Raises as `read`."""
        values = self.read(list, *path)
        if not all(value is None or (type(value) in (int, float) and abs(value) <= 3e38) for value in values):
            raise self._garbled(path, f"{values!r:.80}", "a list of numbers")
        return np.array(values, np.float32)

    def _garbled(self, path: tuple[str | int, ...], seen: str, expected: str) -> EngineError:
        return EngineError(f"{self._named(path)} lacks or garbles a field: {seen}; expected {expected}")

    def _named(self, path: tuple[str | int, ...]) -> str:
        return self._where + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


class Endpoint:
    """A server that is spoken to in JSON. It is not followed to another address.

    Args:
        url: such as "http://127.0.0.1:8000".
        timeout_s: how long one answer may take, from the connection to its last byte. To look up the address of a name
            has the limits of the system.
        what: names the server, for messages.

    Attributes:
        url: without a slash at the end.
    """

    def __init__(self, url: str, *, timeout_s: float, what: str) -> None:
        if not _is_address(url):
            raise ConfigError(f"{url!r:.200} is no address of {what}; expected one like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._what = what
        # no redirects, and nothing but HTTP
        self._opener = OpenerDirector()
        for handler in (ProxyHandler, _Plain, _Encrypted, HTTPDefaultErrorHandler, HTTPErrorProcessor):
            self._opener.add_handler(handler())

    def get(self, path: str) -> Answer:
        """The answer to GET.

        Raises:
            EngineError: when the server cannot be reached, is late, refuses, sends elsewhere, or answers with something
                else than JSON.
        """
        return self._answer(Request(self.url + path), path)

    def post(self, path: str, body: Any) -> Answer:
        """The answer to POST. Raises as `get`."""
        data = json.dumps(body).encode()
        return self._answer(Request(self.url + path, data, {"Content-Type": "application/json"}), path)

    def _answer(self, request: Request, path: str) -> Answer:
        where = f"{self._what} at {self.url}{path}"
        try:
            try:
                with self._opener.open(request, timeout=self._timeout_s) as response:
                    text = _read(response, MAX_RESPONSE_BYTES + 1)
            except HTTPError as error:
                with error:
                    elsewhere = error.headers.get("Location")
                    said = _read(error, MAX_ERROR_CHARS).decode(errors="replace")
                if elsewhere is not None:
                    raise EngineError(f"{where} sends to {elsewhere:.200}; name the address itself") from error
                raise EngineError(f"{where} refused with status {error.code}: {said}") from error
        except TimeoutError as error:
            raise EngineError(f"{where} did not answer within {self._timeout_s:g} s") from error
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise EngineError(f"{where} did not answer within {self._timeout_s:g} s") from error
            raise EngineError(f"{where} cannot be reached or broke off ({reason}). Is it running?") from error
        if len(text) > MAX_RESPONSE_BYTES:
            raise EngineError(f"{where} answered with more than {MAX_RESPONSE_BYTES} bytes; ask for less at once")
        if not text.strip():
            return Answer(None, f"the answer of {where}")
        return Answer(parse_json(text, EngineError, name=f"the answer of {where}"), f"the answer of {where}")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that are not closed, a port that is no number
        return False


def _read(response: HTTPResponse | HTTPError, most_bytes: int) -> bytearray:
    """All of it or `most_bytes`."""
    text = bytearray()
    while len(text) < most_bytes and (part := response.read1(min(_CHUNK_BYTES, most_bytes - len(text)))):
        text += part
    return text


class _TimedConnection(HTTPConnection):
    """Every step of a request ends at one deadline, `timeout` seconds after it began.

    A timeout of the socket counts from byte to byte, so a slow drip would never end.
    """

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._deadline = time.monotonic() + (self.timeout or 0.0)

    def connect(self) -> None:
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        self.timeout = _left(self._deadline) / len(addresses)  # they are tried one after the other
        super().connect()
        self.sock.settimeout(_left(self._deadline))  # of the handshake

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        self.sock.settimeout(_left(self._deadline))
        super().send(data)

    # a proxy's, too
    def response_class(self, sock: socket.socket, **given: Any) -> HTTPResponse:  # type: ignore[override]
        return HTTPResponse(_TimedReads(sock, self._deadline), **given)  # type: ignore[arg-type]


class _TimedTLSConnection(HTTPSConnection, _TimedConnection):
    """Its handshake, too."""


class _TimedReads(RawIOBase):
    """What a socket receives, up to a deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._received = sock.makefile("rb", buffering=0)

    def makefile(self, _: str) -> BufferedReader:
        return BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._received.readinto(buffer)

    def close(self) -> None:
        self._received.close()
        super().close()


class _Plain(HTTPHandler):
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_TimedConnection, req)


class _Encrypted(HTTPSHandler):
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_TimedTLSConnection, req)


def _left(deadline: float) -> float:
    """Seconds until then."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
