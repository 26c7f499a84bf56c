"""The process that calls a user's function. Run as a script, by path: it imports nothing of foreroute.

    python function_worker.py FILE NAME CHANNEL

CHANNEL is the number of an open socket. On it come JSON lines [number, prompt, response, row], and each is answered by
one: {"number": ...} with "value", with "other" (how a value looks that is no number or text), or with "error". A first
answer, of number 0, says that the function was found, or why it was not.
"""

from __future__ import annotations

import importlib.util
import json
import numbers
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_TEXT, MOST_WORDS = 1 << 24, 2000
"""Characters of a text that is returned, and of an error's own words."""


def main() -> None:
    """Answer until the other side is gone."""
    path, name, channel = Path(sys.argv[1]), sys.argv[2], socket.socket(fileno=int(sys.argv[3]))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    here = os.getpid()
    with channel.makefile("r", encoding="utf-8") as questions, channel.makefile("w", encoding="utf-8") as answers:

        def answer(number: int, content: dict[str, Any]) -> None:
            if os.getpid() != here:
                os._exit(0)  # the function forked, and this is not the process that was asked
            answers.write(json.dumps({"number": number, **content}) + "\n")
            answers.flush()

        try:
            function = _load(path, name)
        except BaseException as error:  # what a module raises when it is run
            answer(0, {"error": _words(error)})
            return
        answer(0, {"value": None})
        for line in questions:
            number, *given = json.loads(line)
            answer(number, _called(function, *given))


def answered(prompt: str, response: str, row: dict[str, Any]) -> bool:
    """Whether the last match of a pattern is the answer; for the built-in reward "regex".

    It stands here because a pattern can look for longer than anyone waits, and this file can be run without foreroute.
    """
    pattern = re.compile(row["pattern"])
    matches = list(pattern.finditer(response))
    found = matches[-1].group(1 if pattern.groups else 0) if matches else None
    return found is not None and found.strip() == row["answer"].strip()


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
        if isinstance(value, str) and len(value) > MOST_TEXT:
            return {"other": f"text of {len(value)} characters"}
        if value is None or isinstance(value, str):
            return {"value": value}
        return {"value": float(value)} if isinstance(value, numbers.Real) else {"other": _shown(value)}
    except BaseException as error:  # sys.exit() among them
        return {"error": _words(error)}


def _shown(value: object) -> str:
    try:
        return repr(value)[:80]
    except BaseException as error:
        return f"a {type(value).__name__}, whose repr raises {type(error).__name__}"


def _words(error: BaseException) -> str:
    """The error, and the user's line that raised it, where it was not a line of this file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = len(frames) == 0 or frames[-1].filename == __file__
    where = "" if own else f" (line {frames[-1].lineno} of {frames[-1].filename})"
    try:
        return f"{type(error).__name__}: {str(error)[:MOST_WORDS]}{where}"
    except BaseException as another:
        return f"{type(error).__name__}, whose str raises {type(another).__name__}{where}"


def _end_with(parent: int) -> None:
    """A trainer that was killed takes this process along, whatever the function is doing."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    main()
