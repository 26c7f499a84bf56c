"""The end of a command: one message and an exit code, whatever happens.

    0         it did what was asked
    1         a problem was found (diff, doctor), or something failed that is no mistake of the user's
    2         what was given is wrong, or cannot be read or written
    128 + n   it was ended by signal n: 130 by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP

A verb may ask that the first signal is only noted, as `train` does, which then saves a checkpoint and ends by itself.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

import typer

from foreroute.cli.terminal import Console, prepare_streams
from foreroute.errors import AttachError, ForerouteError, InputError, how_to_install, printable

EXTRA_OF = {
    "pydantic": "cli",
    "torch": "hf",
    "transformers": "hf",
    "jinja2": "report",
    "matplotlib": "report",
    "megatron": "megatron",
    "trl": "trl",
    "httpx": "engines",
    "scipy": "fit",
}
"""Modules that verbs import beyond the light core, and the extra that brings each."""
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""Typer brings its own click since 0.26, and used click before."""
ISSUES = "https://github.com/foreroute/foreroute/issues"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, what schedulers send before they kill, and what a terminal sends that is closed."""


def run(command: Callable[[], Any]) -> NoReturn:
    """Run a command, which returns an exit code or nothing, say how it ended unless all went well, and exit."""
    is_closed = sys.stdout is None
    prepare_streams()
    if is_closed:
        _say("standard output is closed; open it, or send it to /dev/null")
        sys.exit(2)
    with _warnings_on_one_line(), _signals() as received:
        try:
            code = int(command() or 0)
            sys.stdout.flush()
        except BaseException as error:
            code = 0 if received.raised else _code_of(error)
        if received.resender:
            received.resender.cancel()
        is_ended = received.raised > 0  # whatever became of its exception: a destructor drops it
        if is_ended:
            code = 128 + received.raised
            name = "interrupted" if code == 130 else f"ended by {signal.Signals(received.raised).name}"
            _say(name, heading="stopped")
    _drop_broken_streams()
    if is_ended and threading.active_count() > 1:
        os._exit(code)  # a signal ends the command now, and the interpreter would wait for its threads
    sys.exit(code)


def refuse_unused(options: Mapping[str, object], why: str) -> None:
    """Raise `InputError` for options, None where not given, that change nothing; `why` follows these words."""
    if given := [name for name, value in options.items() if value is not None]:
        raise InputError(f"{', '.join(given)} {'change' if len(given) > 1 else 'changes'} nothing {why}")


class Received:
    """The handler of Ctrl-C, SIGTERM and SIGHUP: an exception, so that what is open is closed."""

    raised = 0  # the signal that ended the command
    noted = 0  # the signal that asks a verb to end by itself
    console: Console | None = None  # of the verb that wants the first signal noted
    resender: threading.Timer | None = None  # sends the signal once more whose exception was dropped

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal where a verb wants that. It prints nothing: a handler may run anywhere."""
        if self.console is not None and not self.noted:
            self.noted = number
            # the terminal is gone, and printing there would fail before the state is saved
            self.console.quiet |= number == signal.SIGHUP
            return
        self.raised = number
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


received = Received()
"""The handler of this process, since signals are the process's too."""


@contextmanager
def noting_the_first_signal(console: Console) -> Iterator[Received]:
    """Keep the first signal in `received.noted`, while the context is open; the second ends the command."""
    received.console, received.noted = console, 0
    try:
        yield received
    finally:
        received.console = None


@contextmanager
def _signals() -> Iterator[Received]:
    """Hand the signals to `received`. A signal that is ignored, as under nohup, stays ignored."""
    received.raised, received.resender = 0, None
    before = {number: signal.getsignal(number) for number in ENDING}
    taken = [number for number in ENDING if before[number] not in (signal.SIG_IGN, None)]
    if threading.current_thread() is not threading.main_thread():
        taken = []  # only the main thread may have handlers
    for number in taken:
        signal.signal(number, received)
    hook = sys.unraisablehook

    def send_once_more(dropped: Any) -> None:
        """Send a signal once more whose exception was raised in a destructor or callback, where Python drops it."""
        if not received.raised or not isinstance(dropped.exc_value, KeyboardInterrupt | SystemExit):
            hook(dropped)
            return
        # a moment later: the main thread is still inside of what drops exceptions, and `start` would wait there
        main_thread = threading.main_thread().ident
        received.resender = threading.Timer(0.1, signal.pthread_kill, [main_thread, received.raised])
        _thread.start_new_thread(received.resender.run, ())

    sys.unraisablehook = send_once_more
    try:
        yield received
    finally:
        sys.unraisablehook = hook
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
        case BrokenPipeError():  # the reader has seen enough
            pass
        case OSError(filename=None):
            where = "the system refused to go on" if _can_be_written(sys.stdout) else "standard output"
            _say(f"{where}: {error.strerror or error}")
        case OSError():
            _say(f"{os.fsdecode(error.filename)}: {error.strerror or error}")
        case MemoryError():
            _say(f"there is not enough memory{f' ({error})' if str(error) else ''}")
        case UnicodeEncodeError():
            _say(f"{error.object[max(error.start - 40, 0) : error.end + 40]} is not text in UTF-8; rename it")
        case USAGE_ERROR() if type(error).__name__ == "NoArgsIsHelpError":  # Typer has shown the help
            pass
        case USAGE_ERROR():
            path = error.ctx.command_path if error.ctx else "foreroute"
            _say(f"{error.format_message().strip().rstrip('.')}; {path} --help shows what there is")
        case _:
            with suppress(OSError):
                sys.stderr.write(printable("".join(traceback.format_exception(error))))
            summary = traceback.format_exception_only(error)[-1].strip()
            _say(f"{summary}\nThis is a bug of foreroute. Please report it, with the lines above: {ISSUES}")
            return 1
    return 2


def _say(message: str, *, heading: str = "error") -> None:
    """Print a message on standard error, as one line where it has one."""
    from rich.markup import escape

    with suppress(OSError):
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[bold red]{heading}[/]: {escape(printable(message))}")


def _can_be_written(stream: TextIO) -> bool:
    """Say whether a stream takes what was printed; one that did not still holds it."""
    try:
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _drop_broken_streams() -> None:
    """Drop what cannot be written, or the interpreter would try once more at its end and change the code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        if not _can_be_written(stream):
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())


@contextmanager
def _warnings_on_one_line() -> Iterator[None]:
    """Show each warning as a message of the command, without the line of source that it came from."""
    shown = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: _say(str(message), heading="warning")
    try:
        yield
    finally:
        warnings.showwarning = shown
