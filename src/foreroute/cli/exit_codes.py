"""How a command ends: with one message and an exit code, whatever happens.

    0         it did what was asked
    1         a problem was found (diff, doctor), or something failed that is no mistake of the user's
    2         what was given is wrong, or cannot be read or written
    128 + n   it was ended by signal n: 130 by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP

A verb that handles signals itself, as `train` does, takes their handlers over while it runs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import typer

from foreroute.cli.terminal import Console, heartbeat, prepare_streams
from foreroute.errors import AttachError, ForerouteError, InputError, how_to_install, printable

EXTRA_OF = {
    "pydantic": "cli",
    "torch": "hf",
    "transformers": "hf",
    "jinja2": "report",
    "matplotlib": "report",
    "scipy": "fit",
    "megatron": "megatron",
    "trl": "trl",
}
"""What verbs import that the light core does not bring, and the extra that does."""
USAGE_ERROR = typer.BadParameter.__mro__[1]
"""Typer brings its own click since 0.26, and used click before."""
ISSUES = "https://github.com/foreroute/foreroute/issues"


def run(command: Callable[[], Any]) -> NoReturn:
    """Run a command, say how it ended unless all went well, and exit.

    Args:
        command: returns an exit code, or nothing for 0.
    """
    is_closed = sys.stdout is None
    prepare_streams()
    if is_closed:
        _say("standard output is closed; open it, or send it to /dev/null")
        sys.exit(2)
    with _plain_records(), _signals() as received:
        try:
            with heartbeat():
                code = int(command() or 0)
            sys.stdout.flush()
        except BaseException as error:
            # a library may make another exception of the one that the handler raised: numba a SystemError
            code = 128 + received[-1] if received else _code_of(error)
        is_ended = bool(received) and code == 128 + received[-1]
        if is_ended:
            name = "interrupted" if code == 130 else f"ended by {signal.Signals(received[-1]).name}"
            _say(name, kind="stopped")
    _drop_broken_streams()
    if is_ended and threading.active_count() > 1:  # the interpreter would wait for threads that nobody waits for
        os._exit(code)
    sys.exit(code)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """End on Ctrl-C, SIGTERM and SIGHUP by an exception, so that what is open is closed; yields the signals received.

    Each signal raises once. What closes is interrupted by a second one alone. Python drops an exception that is raised
    in a finalizer; such a signal comes again, a moment later. A signal that is ignored, as under nohup, stays ignored.
    """
    received: list[int] = []
    say_dropped = sys.unraisablehook

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if received and isinstance(what.exc_value, KeyboardInterrupt | SystemExit):
            again = threading.Timer(0.05, os.kill, (os.getpid(), received[-1]))
            again.daemon = True
            again.start()
        else:
            say_dropped(what)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    taken = [number for number in numbers if before[number] not in (signal.SIG_IGN, None)]
    if threading.current_thread() is not threading.main_thread():
        taken = []  # only the main thread may have handlers
    for number in taken:
        signal.signal(number, end)
    sys.unraisablehook = dropped
    try:
        yield received
    finally:
        sys.unraisablehook = say_dropped
        for number in taken:
            signal.signal(number, before[number])


def _code_of(error: BaseException) -> int:
    """Say what went wrong, and give the exit code."""
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        case InputError() | AttachError():
            _say(str(error))
        case ForerouteError():
            _say(str(error))
            return 1
        case ModuleNotFoundError() if (library := (error.name or "").partition(".")[0]) in EXTRA_OF:
            _say(f"this needs {library}, which is not installed; {how_to_install(EXTRA_OF[library])}")
        case BrokenPipeError():  # exit silently: the reader closed the pipe
            pass
        case OSError(filename=None):
            _say(f"the system refused to go on ({error.strerror or error})")
        case OSError():
            _say(f"{os.fsdecode(error.filename)}: {error.strerror or error}")
        case MemoryError():
            _say(f"there is not enough memory{f' ({error})' if str(error) else ''}")
        case UnicodeEncodeError():
            _say(f"{error.object[max(error.start - 40, 0) : error.end + 40]} is not text in UTF-8; rename it")
        case _ if isinstance(error, USAGE_ERROR):
            _say_usage(error)
        case _:
            with suppress(OSError):
                sys.stderr.write(printable("".join(traceback.format_exception(error))))
            summary = traceback.format_exception_only(error)[-1].strip()
            _say(f"{summary}\nThis is a bug of foreroute. Please report it, with the lines above: {ISSUES}")
            return 1
    return 2


def _say_usage(error: Any) -> None:
    """Say what typer does not understand of a command line. Without any argument it has shown the help already."""
    message = error.format_message().strip()
    if message and type(error).__name__ != "NoArgsIsHelpError":
        path = error.ctx.command_path if error.ctx else "foreroute"
        _say(f"{message.rstrip('.')}; {path} --help shows what there is")


def _say(message: str, *, kind: str = "error") -> None:
    from rich.markup import escape

    with suppress(OSError):
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[bold red]{kind}[/]: {escape(printable(message))}")


def _drop_broken_streams() -> None:
    """Drop what cannot be written, or the interpreter would try once more at its end and change the code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())


@contextmanager
def _plain_records() -> Iterator[None]:
    """Make each warning one line, and warnings and records of logging as `printable` as the rest."""

    class Record(logging.LogRecord):
        def getMessage(self) -> str:
            return printable(super().getMessage())

    factory, shown = logging.getLogRecordFactory(), warnings.showwarning
    logging.setLogRecordFactory(Record)
    warnings.showwarning = lambda message, *_, **__: _say(str(message), kind="warning")
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
        warnings.showwarning = shown
