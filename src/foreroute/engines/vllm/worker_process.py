"""A worker process: started, asked, and always ended, however the trainer ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from foreroute.engines.vllm.ipc import Frame, receive_frame, send_frame
from foreroute.errors import EngineError, InputError
from foreroute.files import open_regular

TAIL_LINES = 15
TAIL_BYTES = 1 << 14
GRACE_S = 5.0
MOST_SAID = 2000
"""Characters of one line of the worker's that a message quotes."""


class WorkerProcess:
    """A child process that answers frames. One request is under way at a time, and each has a number.

    Whoever is interrupted while a frame is sent or received, by Ctrl-C or anything else, leaves the channel somewhere
    inside of it. The worker is ended then; an answer that nobody waited for is passed over.

    Args:
        command: what to run; the number of its end of the channel is added as the last argument.
        environment: its environment.
        folder: its working directory; what it prints goes to `worker.log` there.

    Attributes:
        log: the file with everything that the worker printed.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.log = folder / "worker.log"
        self._channel, theirs = socket.socketpair()
        with theirs, open(self.log, "wb") as log:
            try:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    cwd=folder,
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C is the trainer's, and the group is ended as one
                    start_new_session=True,
                )
            except OSError as error:
                self._channel.close()
                raise EngineError(f"the engine worker {command[0]} cannot be started: {error}") from error
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        self._requests = 0
        self._ended = ""

    def send(
        self,
        request: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        what: str,
        timeout_s: float,
    ) -> int:
        """Ask for something; `receive` gets the answer.

        Args:
            request: plain JSON data.
            arrays: by name.
            what: names the request, for messages.
            timeout_s: how long the worker may take to read it.

        Returns:
            The number of the request.

        Raises:
            EngineError: when the worker was ended before, or does not take the request in time, and is ended.
        """
        self._require_running()
        self._requests += 1
        frame = Frame({**request, "request": self._requests}, arrays or {})
        # a worker that is gone is noticed, with its reason, when the answer is read
        with self._under_way(what, timeout_s), suppress(BrokenPipeError, ConnectionResetError):
            send_frame(self._channel, frame, timeout_s=timeout_s)
        return self._requests

    def receive(self, number: int, what: str, *, timeout_s: float) -> Frame:
        """The answer to a request. Those to requests before it are passed over.

        Args:
            number: of the request, from `send`.
            what: names the request, for messages.
            timeout_s: how long to wait for all of it.

        Raises:
            EngineError: when the worker is gone, says that it failed, sends nonsense, or takes too long. Except where
                it only says that it failed, it is ended.
        """
        self._require_running()
        deadline = time.monotonic() + timeout_s
        answered: Any = 0
        with self._under_way(what, timeout_s):
            while answered != number:
                # what was asked before and never waited for is answered first
                reply = receive_frame(self._channel, timeout_s=max(deadline - time.monotonic(), 0.0))
                answered = reply.header.pop("request", None)
                if type(answered) is not int or not 0 < answered <= number:
                    raise EngineError(f"it answers request {answered!r:.40}, asked was request {number}")
        if "error" in reply.header:
            said = f"{reply.header['error']:.{MOST_SAID}}"
            raise EngineError(f"the engine worker could not {what}: {said}.{self._last_lines()}")
        return reply

    def close(self) -> None:
        """End the process and everything it started. May be called again."""
        self._ended = self._ended or "it was closed"
        self._end()

    @contextmanager
    def _under_way(self, what: str, timeout_s: float) -> Iterator[None]:
        """Whatever ends a frame half way ends the worker, which could not be understood any more."""
        try:
            yield
        except TimeoutError as error:
            self._close_because(f"it did not {what} within {timeout_s:g} s")
            raise EngineError(
                f"the engine worker did not {what} within {timeout_s:g} s and was ended; give it longer with timeout_s."
                f"{self._last_lines()}"
            ) from error
        except (OSError, EOFError) as error:
            why = self._why()
            self._close_because(f"it died ({why}) when asked to {what}")
            raise EngineError(f"the engine worker died ({why}) when asked to {what}.{self._last_lines()}") from error
        except EngineError as error:
            self._close_because(f"its answer was damaged when asked to {what}")
            raise EngineError(f"the engine worker's answer is damaged, it was ended: {error}") from error
        except BaseException as error:
            self._close_because(f"{type(error).__name__} came in between when it was asked to {what}")
            raise

    def _close_because(self, why: str) -> None:
        self._ended = why
        self.close()

    def _require_running(self) -> None:
        if self._ended:
            raise EngineError(f"the engine worker was ended before: {self._ended}. Make a new engine")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _why(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        code = self._process.returncode
        if code is None:
            return "it closed the channel"
        if code >= 0:
            return f"exit code {code}"
        return f"signal {-code}" if -code not in set(signal.Signals) else f"signal {signal.Signals(-code).name}"

    def _last_lines(self) -> str:
        try:
            with open_regular(self.log, InputError) as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = log.read(TAIL_BYTES).decode(errors="replace").splitlines()
        except (InputError, OSError):
            return ""
        kept = [line[:MOST_SAID] for line in lines if line.strip()][-TAIL_LINES:]
        return "\nThe last lines that it printed:\n  " + "\n  ".join(kept) if kept else " It printed nothing."


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    """Closing the channel ends an idle worker; one that is busy, or has children, is told by signal."""
    channel.close()
    deadline = time.monotonic() + GRACE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0.1))
            break
    # children that outlive the worker are in its group
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
