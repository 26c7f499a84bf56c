"""`metrics.jsonl`: one JSON object for each finished step of a run, from step 0 on, and no other line.

A checkpoint holds a digest of the lines of all steps before it, so that a run is resumed with the history that it had.
Lines of later steps stay where they are. When their steps run again, they are compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foreroute.errors import ForerouteError, RunFolderError, TraceFileError
from foreroute.files import parse_json, read_file, write_atomically

TIMES = ("seconds", "execution", "device")
"""What no two runs of a step share."""
DEEPEST = 32
"""Records and configurations nest far less."""


class MetricsFile:
    """The lines of `metrics.jsonl` of one run.

    Args:
        path: the file; made with its first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._to_compare: dict[int, dict[str, Any]] = {}

    def records(self) -> list[dict[str, Any]]:
        """Read the records of all finished steps, from 0; a torn last line is none.

        Raises:
            RunFolderError: when a line is no record of its step, naming it.
        """
        return [self._record(number, line) for number, line in enumerate(self._lines())]

    def digest(self, step: int) -> str:
        """Compute XXH3-128, as hex, of the lines of all steps before."""
        from xxhash import xxh3_128

        return xxh3_128(_joined(self._lines()[:step])).hexdigest()

    def append(self, record: dict[str, Any]) -> dict[str, Any]:
        """Add one line and flush it to disk, unless the step ran before and its line is there.

        Returns:
            The record that is there.
        """
        if record["step"] in self._to_compare:
            return self._to_compare.pop(record["step"])
        line = json.dumps(record) + "\n"
        with writing(self.path):
            if not os.path.lexists(self.path):
                # so that the name survives a power cut too
                write_atomically(self.path, line)
                return record
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        return record

    def take_up(self, step: int, digest: str) -> None:
        """Go on with a step, when the lines of those before are what they were.

        Args:
            step: that of a checkpoint.
            digest: of the lines of the steps before, when it was saved.

        Raises:
            RunFolderError: when lines are missing, or are others.
        """
        records = self.records()
        if len(records) < step:
            raise RunFolderError(
                f"{self.path} has the records of {len(records)} steps, and the last checkpoint is of step {step}: "
                "lines are missing. Restore the file from a copy, or start in another folder"
            )
        if self.digest(step) != digest:
            raise RunFolderError(
                f"{self.path} is damaged: the lines of the steps before {step} are not those that were there when the "
                "checkpoint was saved. Restore the file from a copy, or start in another folder"
            )
        # a torn last line goes, so that the next one begins at its beginning
        self._keep(len(records))
        self._to_compare = {record["step"]: record for record in records[step:]}

    def contradicts(self, record: Mapping[str, Any]) -> bool:
        """Say whether the step was recorded before, and came out otherwise. Times are no part of it."""
        before = self._to_compare.get(record["step"])
        return before is not None and _compared(before) != _compared(record)

    def move(self, step: int, target: Path) -> None:
        """Put the lines of a step and of all later ones into a file, unless that is there already."""
        self.records()
        lines = self._lines()
        with writing(target):
            if not os.path.lexists(target):
                write_atomically(target, _joined(lines[step:]))
        self._keep(step)
        self._to_compare.clear()

    def _lines(self) -> list[bytes]:
        """Read the lines that were written whole."""
        return read_file(self.path, RunFolderError).split(b"\n")[:-1] if os.path.lexists(self.path) else []

    def _keep(self, step: int) -> None:
        if os.path.lexists(self.path):
            kept = _joined(self._lines()[:step])
            if kept != read_file(self.path, RunFolderError):
                with writing(self.path):
                    write_atomically(self.path, kept)

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            record = parse_json(line, RunFolderError, name="it")
            if not isinstance(record, dict):
                raise RunFolderError(f"it is a {type(record).__name__}, no object")
            require_shallow(record)
            if type(record.get("step")) is not int or record["step"] != number:
                raise RunFolderError(f"its step is {record.get('step')!r:.40}, expected {number}")
        except RunFolderError as error:
            raise RunFolderError(
                f"{self.path}, line {number + 1} is damaged: {error}. Restore the file from a copy. Where the last "
                f"checkpoint is of step {number} or before, this line and those after it may be removed instead: their "
                "steps run again"
            ) from error
        return record


def require_shallow(value: Any, deepest: int = DEEPEST) -> None:
    """Make sure that a value of JSON can be walked: what can be read may nest too deep for a function that recurses.

    Raises:
        RunFolderError: when it nests deeper than `deepest`.
    """
    if deepest == 0:
        raise RunFolderError("it is nested too deep")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            require_shallow(each, deepest - 1)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make a `RunFolderError` of an error in writing `path`."""
    try:
        yield
    except TraceFileError as error:
        raise RunFolderError(f"{error}. Make room, then go on with --resume") from error
    except ForerouteError:
        raise
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be written ({error}). What was written before is whole: make room, then go on with --resume"
        ) from error


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _compared(record: Mapping[str, Any]) -> str:
    """Give one text for a record as it was written and as it is read again."""
    figures = {key: value for key, value in record.items() if key not in TIMES}
    return json.dumps(json.loads(json.dumps(figures)), sort_keys=True)
