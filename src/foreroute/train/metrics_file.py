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

from foreroute.errors import ForerouteError, RunFolderError
from foreroute.files import blake2b_hex, parse_json, read_file, write_atomically
from foreroute.records import parse_step

OWN = ("seconds", "execution", "device", "alarms")
"""What two runs of a step need not share; thresholds of alarms may change when a run is resumed."""


class MetricsFile:
    """The lines of `metrics.jsonl` of one run.

    Args:
        path: the file; made with its first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._earlier: dict[int, dict[str, Any]] = {}

    def records(self) -> list[dict[str, Any]]:
        """Read the records of all finished steps, from 0; a torn last line is none.

        Raises:
            RunFolderError: when a line is no record of its step, naming it.
        """
        return [self._record(number, line) for number, line in enumerate(self._lines())]

    def digest(self, step: int) -> str:
        """Compute `blake2b_hex` of the lines of all steps before."""
        return blake2b_hex(_joined(self._lines()[:step]))

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
        self._earlier = {record["step"]: record for record in records[step:]}

    def append(self, record: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
        """Add one line and flush it to disk, unless the step ran before and its line is there.

        A step that runs again on another machine, or with other libraries, may come out otherwise. Its earlier line
        and those of later steps are then put into superseded-1.jsonl, or the next such file.

        Returns:
            The record that is there, and the file that earlier lines were put into, if they were.
        """
        before, aside = self._earlier.pop(record["step"], None), None
        if before is not None:
            if _compared(before) == _compared(record):
                return before, None
            aside = self._put_aside(record["step"])
        line = json.dumps(record) + "\n"
        with writing(self.path):
            if not os.path.lexists(self.path):
                # so that the name survives a power cut too
                write_atomically(self.path, line)
                return record, aside
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        return record, aside

    def _put_aside(self, step: int) -> Path:
        number = 1
        while os.path.lexists(aside := self.path.with_name(f"superseded-{number}.jsonl")):
            number += 1
        with writing(aside):
            write_atomically(aside, _joined(self._lines()[step:]))
        self._keep(step)
        self._earlier.clear()
        return aside

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
            record: dict[str, Any] = parse_json(line, RunFolderError, name="it")
            step = parse_step(line).step
            if step != number:
                raise RunFolderError(f"its step is {step}, expected {number}")
        except RunFolderError as error:
            raise RunFolderError(
                f"{self.path}, line {number + 1} is damaged: {error}. Restore the file from a copy. Where "
                f"the last checkpoint is of step {number} or before, this line and those after it may be removed "
                "instead: their steps run again"
            ) from error
        return record


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make a `RunFolderError` of an error in writing `path`."""
    try:
        yield
    except ForerouteError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise RunFolderError(f"{error}. Make room, then go on with --resume") from error
    except (OSError, ValueError) as error:
        raise RunFolderError(
            f"{path} cannot be written ({error}). What was written before is whole: make room, then go on with --resume"
        ) from error


def _joined(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _compared(record: Mapping[str, Any]) -> str:
    """Give one text for a record as it was written and as it is read again."""
    figures = {key: value for key, value in record.items() if key not in OWN}
    return json.dumps(json.loads(json.dumps(figures)), sort_keys=True)
