"""JSON over HTTP for engines behind a server: requests with a deadline, and answers whose fields are checked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import ConfigError, EngineError, how_to_install
from foreroute.files.regular import parse_json

try:
    import httpx
    from anyio.from_thread import start_blocking_portal  # which httpx brings
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"an engine behind a server needs httpx, which is not installed; {how_to_install('engines')}", name=error.name
    ) from error

SMALL = 1 << 24
"""A bound of the bytes of an answer without routes."""
MAX_ERROR_CHARS = 600
KEPT_IDLE_S = 2.0
"""Servers on uvicorn close a connection that was idle for 5 s, also while the next request is on its way there."""
_NAMES = {str: "text", int: "an integer", bool: "true or false", dict: "an object", list: "a list"}

T = TypeVar("T")


class BrokenOffError(EngineError):
    """Raised when a server cannot be reached, or ends a connection: it may have died."""


class Client:
    """JSON client of one server. Redirects and proxies are disabled."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,  # from the connection to the last byte of an answer
        what: str,  # names the server in messages
        socket: Path | None = None,  # of Unix, to connect to instead of the host and port
        at_once: int = 32,
        missing: Mapping[str, str] | None = None,  # what to do when a path is not found, by path
    ) -> None:
        try:
            address = httpx.URL(url)
        except (httpx.InvalidURL, TypeError, ValueError):
            address = httpx.URL("")
        port = 1 if address.port is None else address.port  # None is the default of the scheme
        is_address = address.scheme in ("http", "https") and address.host and 0 < port < 1 << 16
        if not is_address or address.userinfo or address.query or address.fragment or str(url).split() != [str(url)]:
            raise ConfigError(f"{url!r:.200} is no address of {what}; expected one like http://127.0.0.1:8000")
        self._url, self._what, self._socket = address, what, socket
        self._timeout_s, self._at_once, self._missing = timeout_s, at_once, missing or {}
        # once, since the certificates of authorities take a while to load; and not in the thread of a request: one that
        # has used OpenSSL holds a lock of it while it ends, for which a child that is forked then waits without end
        self._ssl = httpx.create_ssl_context(verify=address.scheme == "https")

    def get(self, path: str) -> Answer:
        """Get what is at a path. Raises as `ask`."""
        return self.ask(path, [None])[0]

    def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Post JSON. Raises as `ask`."""
        return self.ask(path, [body])[0]

    def ask(self, path: str, bodies: Sequence[Mapping[str, Any] | None], *, most_bytes: int = SMALL) -> list[Answer]:
        """Post each body to a path, or get the path for None; return the answers in the same order.

        Raises `EngineError` when the server cannot be reached, is late, refuses, redirects, or answers with something
        else than JSON, more than `most_bytes`, or less than it announced.
        """
        # in a loop and a thread of its own, since the caller's may run a loop already
        with start_blocking_portal(name="foreroute-http") as portal:
            texts = portal.call(self._request_all, path, bodies, most_bytes)
        name = f"the answer of {path} of {self._what}"
        return [Answer(parse_json(text, EngineError, name=name) if text.strip() else None, name) for text in texts]

    async def _request_all(
        self, path: str, bodies: Sequence[Mapping[str, Any] | None], most_bytes: int
    ) -> list[bytearray]:
        gate = asyncio.Semaphore(self._at_once)
        transport = httpx.AsyncHTTPTransport(
            verify=self._ssl,
            uds=None if self._socket is None else str(self._socket),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=self._at_once, keepalive_expiry=KEPT_IDLE_S
            ),
        )
        async with httpx.AsyncClient(
            base_url=self._url,
            # compressed bytes have no size that is known before they are unpacked
            headers={"Accept-Encoding": "identity"},
            transport=transport,
            timeout=None,  # the one deadline is that of `_request`
            trust_env=False,
        ) as client:

            async def request(body: Mapping[str, Any] | None) -> bytearray:
                async with gate:
                    return await self._request(client, path, body, most_bytes)

            try:
                # one that fails, or an interrupted caller, cancels all, and with them what the server does for them
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(request(body)) for body in bodies]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from errors.exceptions[0].__cause__
            return [task.result() for task in tasks]

    async def _request(
        self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | None, most_bytes: int
    ) -> bytearray:
        method, text = "GET" if body is None else "POST", bytearray()
        where = f"{method} {path} of {self._what}"
        try:
            async with asyncio.timeout(self._timeout_s), client.stream(method, path, json=body) as response:
                most = most_bytes if response.is_success else 4 * MAX_ERROR_CHARS
                async for part in response.aiter_raw():
                    text += part
                    if len(text) > most:
                        break
        except TimeoutError as error:
            raise EngineError(f"{where} did not answer within {self._timeout_s:g} s") from error
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise BrokenOffError(f"{where} cannot be reached or broke off ({error!r:.200}). Is it running?") from error
        if not response.is_success:
            said = bytes(text).decode(errors="replace")[:MAX_ERROR_CHARS]
            status = response.status_code
            what_to_do = self._missing.get(path.partition("?")[0]) if status == httpx.codes.NOT_FOUND else None
            raise EngineError(f"{where} refused with status {status}: {said}{f'. {what_to_do}' if what_to_do else ''}")
        if len(text) > most_bytes:
            raise EngineError(f"{where} answered with more than {most_bytes} bytes, which is more than was asked for")
        return text


class Answer:
    """JSON from a server, whose fields are checked as they are read; `where` names it in messages."""

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self._where = where

    def read(self, expected: type[T], *path: str) -> T:
        """Return the value at a path of names; raise `EngineError` when none of the expected type is there."""
        value = self.value
        for name in path:
            if not isinstance(value, dict) or name not in value:
                raise self._error(path, f"{value!r:.80} has no {name!r}", _NAMES[expected])
            value = value[name]
        # not isinstance, for which true and false are integers
        if type(value) is not expected:
            raise self._error(path, f"{value!r:.80}", _NAMES[expected])
        return value

    def has(self, name: str) -> bool:
        """Tell whether this is an object with a field of this name that is not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def elements(self, *path: str) -> list[Answer]:
        """Return the elements of the list at a path. Raises as `read`."""
        where = ".".join([self._where, *path])
        return [Answer(value, f"{where}[{number}]") for number, value in enumerate(self.read(list, *path))]

    def integers(self, *path: str) -> NDArray[np.int32]:
        """Return the list of integers of 32 bits at a path. Raises as `read`."""
        values = self.read(list, *path)
        if not all(type(value) is int and abs(value) < 1 << 31 for value in values):
            raise self._error(path, f"{values!r:.80}", "a list of integers of 32 bits")
        return np.array(values, np.int32)

    def numbers(self, *path: str) -> NDArray[np.float32]:
        """Return the list of numbers at a path, with NaN for null. Raises as `read`."""
        values = self.read(list, *path)
        # 3e38 is the most that float32 holds, about; NaN and infinity of Python's JSON fail the comparison
        if not all(value is None or (type(value) in (int, float) and abs(value) <= 3e38) for value in values):
            raise self._error(path, f"{values!r:.80}", "a list of numbers")
        return np.array(values, np.float32)

    def _error(self, path: tuple[str, ...], seen: str, expected: str) -> EngineError:
        where = ".".join([self._where, *path])
        return EngineError(f"{where} lacks or garbles a field: {seen}; expected {expected}")
