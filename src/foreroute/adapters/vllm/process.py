"""A worker process: started, asked, and always ended, however the trainer ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from foreroute.adapters.vllm.frames import Frame, receive_frame, send_frame
from foreroute.errors import EngineError

TAIL_LINES = 15
TAIL_BYTES = 1 << 14
GRACE_S = 5.0


class WorkerProcess:
    """A child process that answers frames. One request is under way at a time.

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

    def send(self, request: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Ask for something; `receive` gets the answer."""
        # a worker that is gone is noticed, with its reason, when the answer is read
        with suppress(OSError):
            send_frame(self._channel, Frame(dict(request), arrays or {}))

    def receive(self, what: str, *, timeout_s: float) -> Frame:
        """The answer to the last request.

        Args:
            what: names the request, for messages.
            timeout_s: how long to wait for all of it.

        Raises:
            EngineError: when the worker is gone, says that it failed, sends nonsense, or takes too long. Except where
                it only says that it failed, it is ended.
        """
        try:
            reply = receive_frame(self._channel, timeout_s=timeout_s)
        except TimeoutError as error:
            self.close()
            raise EngineError(
                f"the engine worker did not {what} within {timeout_s:g} s and was ended; give it longer with timeout_s."
                f"{self._last_lines()}"
            ) from error
        except (OSError, EOFError) as error:
            raise EngineError(
                f"the engine worker died ({self._why()}) when asked to {what}.{self._last_lines()}"
            ) from error
        except EngineError as error:
            self.close()
            raise EngineError(f"the engine worker's answer is damaged, it was ended: {error}") from error
        if "error" in reply.header:
            raise EngineError(f"the engine worker could not {what}: {reply.header['error']}.{self._last_lines()}")
        return reply

    def close(self) -> None:
        """End the process and everything it started. May be called again."""
        self._end()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def _why(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        code = self._process.returncode
        self.close()
        if code is None:
            return "it closed the channel"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _last_lines(self) -> str:
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.path.getsize(self.log) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        kept = [line for line in lines if line.strip()][-TAIL_LINES:]
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
