"""JSON over HTTP, for engines behind a server."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from foreroute.errors import ConfigError, EngineError

MAX_RESPONSE_BYTES = 1 << 32
MAX_ERROR_CHARS = 600


class Endpoint:
    """A server that is spoken to in JSON.

    Args:
        url: such as "http://127.0.0.1:8000".
        timeout_s: how long one answer may keep silent.
        what: names the server, for messages.

    Attributes:
        url: without a slash at the end.
    """

    def __init__(self, url: str, *, timeout_s: float, what: str) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError(f"{url!r} is no address of {what}; expected one like http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._what = what

    def get(self, path: str) -> Any:
        """The answer to GET.

        Raises:
            EngineError: when the server cannot be reached, is late, refuses, or answers with something else than JSON.
        """
        return self._answer(Request(self.url + path), path)

    def post(self, path: str, body: Any) -> Any:
        """The answer to POST. Raises as `get`."""
        data = json.dumps(body).encode()
        return self._answer(Request(self.url + path, data, {"Content-Type": "application/json"}), path)

    def _answer(self, request: Request, path: str) -> Any:
        where = f"{self._what} at {self.url}{path}"
        try:
            with urlopen(request, timeout=self._timeout_s) as response:
                text = response.read(MAX_RESPONSE_BYTES + 1)
        except HTTPError as error:
            said = error.read(MAX_ERROR_CHARS).decode(errors="replace")
            raise EngineError(f"{where} refused with status {error.code}: {said}") from error
        except TimeoutError as error:
            raise EngineError(f"{where} did not answer within {self._timeout_s:g} s") from error
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise EngineError(f"{where} cannot be reached or broke off ({reason}). Is it running?") from error
        if len(text) > MAX_RESPONSE_BYTES:
            raise EngineError(f"{where} answered with more than {MAX_RESPONSE_BYTES} bytes; ask for less at once")
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            raise EngineError(f"{where} answered with {text[:60]!r}; expected JSON") from error
