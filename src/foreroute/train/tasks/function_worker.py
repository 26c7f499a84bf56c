"""The process that calls a user's function. Run as a script, by path: it imports nothing of foreroute.

    python function_worker.py FILE NAME CHANNEL

CHANNEL is the number of an open socket. On it come JSON lines [prompt, response, row], and each is answered by one:
{"value": ...} or {"error": "..."}; the first line of all says that the function was found, or why it was not.
"""

from __future__ import annotations

import importlib.util
import json
import numbers
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer until the other side is gone."""
    path, name, channel = Path(sys.argv[1]), sys.argv[2], socket.socket(fileno=int(sys.argv[3]))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with channel.makefile("r", encoding="utf-8") as questions, channel.makefile("w", encoding="utf-8") as answers:

        def answer(content: dict[str, Any]) -> None:
            answers.write(json.dumps(content) + "\n")
            answers.flush()

        try:
            function = _load(path, name)
        except BaseException as error:  # what a module raises when it is run
            answer({"error": _words(error)})
            return
        answer({"value": None})
        for line in questions:
            answer(_called(function, *json.loads(line)))


def _load(path: Path, name: str) -> Callable[[str, str, dict[str, Any]], object]:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise AttributeError(f"{path} has no function {name}")
    return function  # type: ignore[no-any-return]


def _called(function: Callable[[str, str, dict[str, Any]], object], *given: Any) -> dict[str, Any]:
    try:
        value = function(*given)
    except BaseException as error:  # sys.exit() among them
        return {"error": _words(error)}
    if isinstance(value, numbers.Real):
        return {"value": float(value)}
    return {"value": value} if value is None or isinstance(value, str) else {"other": repr(value)[:80]}


def _words(error: BaseException) -> str:
    """The error, and the user's line that raised it, where it was not a line of this file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = len(frames) == 0 or frames[-1].filename == __file__
    where = "" if own else f" (line {frames[-1].lineno} of {frames[-1].filename})"
    return f"{type(error).__name__}: {error}{where}"


def _end_with(parent: int) -> None:
    """A trainer that was killed takes this process along, whatever the function is doing."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    main()
