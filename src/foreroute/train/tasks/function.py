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
_MOST_BYTES = 1 << 26


class UserFunction:
    """`function(prompt, response, row)` of a file, with a deadline for each call.

    The function keeps its state from call to call, except where one was ended. What it prints goes to stderr.

    Args:
        reference: "file.py:function", the file relative to the current directory.
        what: the configuration's name for it, for messages.
        timeout_s: of each call.

    Raises:
        ConfigError: when there is no such file or function, or the file cannot be imported.
    """

    def __init__(self, reference: str, *, what: str, timeout_s: float) -> None:
        path, _, self._name = reference.rpartition(":")
        self._path = Path(path).absolute()
        self._label = f"{what} = {reference!r}"
        self._timeout_s = timeout_s
        self._worker: _Worker | None = None
        if not self._path.is_file():
            raise ConfigError(f"{self._label}: {self._path} is no file")
        try:
            self._started()
        except FunctionError as error:
            raise ConfigError(str(error)) from error

    def number(self, prompt: str, response: str, row: Mapping[str, Any]) -> float:
        """A finite number that it returned.

        Raises:
            FunctionError: when it raised, took too long, died, or returned something else.
        """
        answer = self._call(prompt, response, row)
        value = answer.get("value")
        if not isinstance(value, float) or not math.isfinite(value):
            raise FunctionError(f"{self._label} returned {_shown(answer)}; expected a finite number")
        return value

    def text(self, prompt: str, response: str, row: Mapping[str, Any]) -> str | None:
        """A text that it returned, or None. Raises as `number`."""
        answer = self._call(prompt, response, row)
        value = answer.get("value")
        if "value" not in answer or not (value is None or isinstance(value, str)):
            raise FunctionError(f"{self._label} returned {_shown(answer)}; expected text or None")
        return value

    def close(self) -> None:
        """End the process. May be called again."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _call(self, *given: Any) -> dict[str, Any]:
        worker = self._started()
        return self._answer(worker, self._timeout_s, json.dumps(given))

    def _started(self) -> _Worker:
        if self._worker is None:
            self._worker = _Worker(self._path, self._name)
            self._answer(self._worker, LOADING_S, None)
        return self._worker

    def _answer(self, worker: _Worker, timeout_s: float, question: str | None) -> dict[str, Any]:
        try:
            answer = worker.ask(question, timeout_s)
        except TimeoutError as error:
            self.close()
            raise FunctionError(f"{self._label} took more than {timeout_s:g} s and was ended") from error
        except (OSError, EOFError) as error:
            self.close()
            raise FunctionError(f"{self._label} ended its process ({worker.why()})") from error
        if "error" in answer:
            if question is None:
                self.close()
            raise FunctionError(f"{self._label} failed: {answer['error']}")
        return answer


class _Worker:
    """The process, and one end of a socket to it."""

    def __init__(self, path: Path, name: str) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, function_worker.__file__, str(path), name, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__ or subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is the trainer's, and what the function started is ended with it
                start_new_session=True,
            )
        self.end = weakref.finalize(self, _end, self._process, self._channel)

    def ask(self, question: str | None, timeout_s: float) -> dict[str, Any]:
        """The next answer, to a question if there is one."""
        deadline = time.monotonic() + timeout_s
        if question is not None:
            self._channel.settimeout(timeout_s)
            self._channel.sendall(question.encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._channel.settimeout(left)
            part = self._channel.recv(1 << 16)
            if not part or len(received) > _MOST_BYTES:
                raise EOFError
            received += part
        answer: dict[str, Any] = json.loads(received)
        return answer

    def why(self) -> str:
        """How the process ended."""
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _shown(answer: Mapping[str, Any]) -> str:
    return str(answer["other"]) if "other" in answer else repr(answer.get("value"))
