"""A user's Python function, called in a process of its own, so that one that hangs or dies can be ended."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from foreroute.errors import ConfigError, FunctionError
from foreroute.train.tasks import function_worker

LOADING_S = 60.0
"""Seconds that the module of a function may take to be imported."""
_MOST_BYTES = 1 << 27
"""Of an answer: a text of `function_worker.MOST_TEXT` characters, 6 bytes each as escaped JSON, has 96 MiB."""


class UserFunction:
    """`function(prompt, response, row)` of a file, with a deadline for each call.

    The function keeps its state from call to call, except where one was ended. What it prints goes to stderr.

    Args:
        reference: "file.py:function", the file relative to the current directory.
        label: what messages call it.
        timeout_s: of each call.

    Raises:
        ConfigError: when there is no such file or function, or the file cannot be imported.
    """

    def __init__(self, reference: str, *, label: str, timeout_s: float) -> None:
        path, _, self._name = reference.rpartition(":")
        self._path = Path(path).absolute()
        self._label = label
        self._timeout_s = timeout_s
        self._asked = 0
        self._channel: socket.socket | None = None
        if not os.path.isfile(self._path):  # unlike Path.is_file, false for a name that is too long
            raise ConfigError(f"{self._label}: {self._path} is no file")
        try:
            self._start()
        except FunctionError as error:
            raise ConfigError(str(error)) from error

    def number(self, prompt: str, response: str, row: Mapping[str, Any]) -> float:
        """Call it for a finite number.

        Raises:
            FunctionError: when it raised, took too long, died, or returned something else.
        """
        answer = self._call(prompt, response, row)
        value = answer.get("value")
        if not isinstance(value, float) or not math.isfinite(value):
            raise FunctionError(f"{self._label} returned {_shown(answer)}; expected a finite number")
        return value

    def text(self, prompt: str, response: str, row: Mapping[str, Any]) -> str | None:
        """Call it for a text or None. Raises as `number`."""
        answer = self._call(prompt, response, row)
        value = answer.get("value")
        if "value" not in answer or not (value is None or isinstance(value, str)):
            raise FunctionError(f"{self._label} returned {_shown(answer)}; expected text or None")
        return value

    def close(self) -> None:
        """End the process. May be called again."""
        if self._channel is not None:
            self._channel = None
            self._end()

    def _start(self) -> None:
        self._asked = 0
        try:
            self._channel, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, function_worker.__file__, str(self._path), self._name, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=sys.__stderr__ or subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C is the trainer's, and what the function started is ended with it
                    start_new_session=True,
                )
        except OSError as error:
            self._channel = None
            raise FunctionError(f"{self._label} gets no process of its own ({error})") from error
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        try:
            self._answer(LOADING_S)
        except FunctionError:
            self.close()
            raise

    def _call(self, *given: Any) -> dict[str, Any]:
        if self._channel is None:
            self._start()
        self._asked += 1
        return self._answer(self._timeout_s, json.dumps([self._asked, *given]).encode() + b"\n")

    def _answer(self, timeout_s: float, question: bytes = b"") -> dict[str, Any]:
        """Wait for the next answer, to a question if there is one. What goes wrong on the way ends the process."""
        try:
            answer = self._exchange(question, timeout_s)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError):
                why = f"wrote to the socket that its answers go through; it was ended ({error})"
            elif isinstance(error, TimeoutError):
                # a process that it left behind keeps the socket open when it ends itself
                why = self._ended(0.0) or f"took more than {timeout_s:g} s and was ended"
            else:
                why = self._ended(1.0) or "closed the socket that its answers go through; it was ended"
            self.close()
            raise FunctionError(f"{self._label} {why}") from error
        if "error" in answer:
            raise FunctionError(f"{self._label} failed: {answer['error']}")
        return answer

    def _exchange(self, question: bytes, timeout_s: float) -> dict[str, Any]:
        """Raises TimeoutError, ConnectionError where the other side is closed, ValueError for something else there."""
        assert self._channel is not None, "the process was started"
        deadline = time.monotonic() + timeout_s
        self._channel.settimeout(timeout_s)
        self._channel.sendall(question)
        received = bytearray()
        while b"\n" not in received[-(1 << 16) :]:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._channel.settimeout(left)
            part = self._channel.recv(1 << 16)
            if not part:
                raise ConnectionError
            received += part
            if len(received) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES} bytes")
        return _parsed(received, self._asked)

    def _ended(self, within_s: float) -> str | None:
        """Say how the process ended by itself, or None if it has not."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None
        if code >= 0:
            return f"ended its process (exit code {code})"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return f"ended its process (signal {name})"


def _parsed(line: bytearray, number: int) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(answer, dict) or answer.get("number") != number:
        raise ValueError(f"{bytes(line[:60])!r}; expected the answer to question {number}")
    value = answer.get("value")
    kinds = {"error": str, "other": str}
    if not all(isinstance(answer[key], kind) for key, kind in kinds.items() if key in answer) or not (
        value is None or isinstance(value, str | float)
    ):
        raise ValueError(f"{bytes(line[:60])!r}; expected a number or text")
    return answer


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _shown(answer: Mapping[str, Any]) -> str:
    return str(answer["other"]) if "other" in answer else repr(answer.get("value"))
